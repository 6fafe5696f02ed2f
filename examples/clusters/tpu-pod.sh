#!/usr/bin/env bash
# A TPU pod slice of Google Cloud: the same command on all hosts, which find each other.
#
#   TPU=my-slice ZONE=us-east5-a DATA=gs://bucket/data RUN=gs://bucket/run examples/clusters/tpu-pod.sh
#
# Run it again after a failure, also with a slice of a different size: the job resumes from its newest checkpoint.
set -euo pipefail

gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "
  cd meshfeed && python examples/train_lm.py --coordinator auto \
    --data '$DATA/*.array_record' --checkpoints '$RUN' --steps ${STEPS:-1000} --batch ${BATCH:-512}"
