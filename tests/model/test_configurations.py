"""Feeds of many configurations against the reference model: every two values of every two settings meet."""

from __future__ import annotations

import campaign
import pairwise
import pytest
import real_hosts
import simulated_hosts
from configurations import DEFAULTS, ONE_HOST, REAL, SIMULATED, Records, valid, valid_on_devices

ONE_HOST_CONFIGURATIONS, REAL_CONFIGURATIONS = 80, 40


@pytest.mark.slow
def test_simulated_hosts_give_what_the_model_says(tmp_path):
    configs = campaign.of_ci()  # `scripts/chaos --configurations N` draws random ones too
    covered, possible = pairwise.coverage(SIMULATED, configs, valid)
    assert covered == possible > 5000
    assert not (found := campaign.failures(configs, str(tmp_path))), "\n".join(found)


@pytest.mark.slow
def test_one_host_with_real_devices_gives_what_the_model_says(tmp_path):
    for config in campaign.draw(ONE_HOST, 3, ONE_HOST_CONFIGURATIONS, valid_on_devices):
        text = campaign.failure(config, str(tmp_path), here=True)
        assert text is None, f"{text}\n{config}"


@pytest.mark.slow
@pytest.mark.multihost
def test_real_hosts_give_what_the_model_says(tmp_path):
    configs = campaign.draw({**REAL, "num_workers": [0]}, 2, 400)[::10][:REAL_CONFIGURATIONS]
    with real_hosts.pool() as hosts:
        failures = real_hosts.play_all(hosts, configs, str(tmp_path))
    for number, text in failures.items():
        pytest.fail(f"{text}\n{campaign.script(configs[number], real=True)}")


def test_a_feed_at_odds_with_the_model_is_noticed(tmp_path, monkeypatch):
    config = {**DEFAULTS, "records": 13, "hosts": 2, "script": "resume", "taken": 1}
    with simulated_hosts.simulation():
        assert campaign.failure(config, str(tmp_path)) is None
        read = Records.__getitem__
        monkeypatch.setattr(Records, "__getitem__", lambda records, i: read(records, i + (i == 7)))
        assert "leaf id" in campaign.failure(config, str(tmp_path))


def test_a_failing_configuration_is_shrunk_to_what_matters():
    config = {**SIMULATED_SAMPLE, "shuffle": True, "hosts": 4, "records": 40}
    small = campaign.shrunk(config, lambda c: c["shuffle"] is True and c["hosts"] > 1)
    assert {name: value for name, value in small.items() if value is not DEFAULTS[name]} == {
        "shuffle": True,
        "hosts": 2,
    }
    compile(campaign.script(small, real=False), "script", "exec")


SIMULATED_SAMPLE = {**DEFAULTS, "source": "mixture", "end": "pad", "load": "once", "prefetch": 4, "script": "twice"}
