#!/usr/bin/env bash
# Restarts a job on a different number of hosts when one of them fails, as a scheduler does with the remaining machines:
#
#   examples/elastic_restart.sh "4 3 2" python examples/train_lm.py --data 'data/*' --checkpoints run --steps 1000
#
# runs the command on 4 hosts, after a failure on 3, then on 2. Each host is a process on this machine and gets
# --coordinator, --num-hosts and --host. The command resumes from its newest checkpoint, so no record is lost or repeated.
set -uo pipefail
numbers=$1
shift

run() { # number of hosts, port, command...: 0 if all hosts succeed; ends the others if one fails
  local num_hosts=$1 port=$2 host
  shift 2
  local pids=()
  for ((host = 0; host < num_hosts; host++)); do
    "$@" --coordinator "127.0.0.1:$port" --num-hosts "$num_hosts" --host "$host" &
    pids+=($!)
  done
  for ((host = 0; host < num_hosts; host++)); do
    if ! wait -n "${pids[@]}"; then
      kill -KILL "${pids[@]}" 2>/dev/null
      wait
      return 1
    fi
  done
}

port=${PORT:-8476}
for num_hosts in $numbers; do
  echo "starting on $num_hosts hosts" >&2
  run "$num_hosts" "$((port++))" "$@" && exit 0
  echo "a host failed" >&2
done
exit 1
