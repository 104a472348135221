"""Settings of the server: what makes no sense is named before anything is loaded."""

import pytest

from services.sim_server.serve import SimServerSettings, main


def test_a_number_of_workers_below_one_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="workers: expected at least 1; got 0"):
        SimServerSettings(workers=0)
    with pytest.raises(SystemExit) as caught:
        main(["--workers", "0"])
    assert caught.value.code == 2
    assert "workers: expected at least 1; got 0" in capsys.readouterr().err
