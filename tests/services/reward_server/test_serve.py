"""Settings of the server: what makes no sense is named before anything is loaded."""

import pytest

from services.reward_server.serve import RewardServerSettings, main


def test_a_number_of_threads_below_one_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="threads: expected at least 1; got 0"):
        RewardServerSettings(threads=0)
    with pytest.raises(SystemExit) as caught:
        main(["--threads", "0"])
    assert caught.value.code == 2
    assert "threads: expected at least 1; got 0" in capsys.readouterr().err
