"""The scoreboard of schedules: hand-worked figures, bounds that hold, errors in one sentence, and valid entries."""

import pytest

from docs.programs.scoreboard import FOLDER, read_entry
from workbench.drawing.score import MESSAGES, TIMES, Score, Setting, bound, published, ranking, settings
from workbench.schedules.checker import check


def test_ranking_by_hand() -> None:
    """Each rank works for 8 x 3. To this, 1F1B adds 3 (p - 1), ZB-H1 p - 1, ZB-V and ZB-H1 with two stages half of it,
    and V-Min (4 p - 5) / 2. (AFAB holds 8 micro-batches, interleaved 1F1B and DualPipeV hold more than 4.)
    """
    setting = Setting(4, 8, "p", 0.0, "equal")
    assert ranking(setting, published(setting)) == [
        Score(1, "zb_h1 (v 2)", 25.5, pytest.approx(1.5 / 25.5), 4),
        Score(1, "zbv (v 2)", 25.5, pytest.approx(1.5 / 25.5), 4),
        Score(3, "zb_h1 (v 1)", 27, pytest.approx(3 / 27), 4),
        Score(4, "v_min (v 2)", 29.5, pytest.approx(5.5 / 29.5), 2),
        Score(5, "1f1b (v 1)", 33, pytest.approx(9 / 33), 4),
    ]


def test_bound_by_hand() -> None:
    """The last rank starts after three forwards of a half, and works for 8 x 3. In a third of the memory, there is room
    for one micro-batch. In a V with 8 stages, the first one holds it for 4 forwards, 4 backwards and a W of a half, the
    last one for 1.5, and each holds half of it: (8.5 + 1.5) / 2 = 5 for each of 8 micro-batches.
    """
    assert bound(Setting(4, 8, "p", 0.0, "equal")) == 1.5 + 8 * 3
    assert bound(Setting(4, 8, "p", 0.1, "equal")) == pytest.approx(1.5 + 0.3 + 8 * 3)
    assert bound(Setting(4, 8, "p/3", 0.0, "equal")) == 1.5 + 8 * 5


def test_entries_fit_the_settings_that_they_claim() -> None:
    for path in FOLDER.glob("*.csv"):
        entry = read_entry(path)
        check(entry.schedule)
        pp, micro_batches = map(int, path.stem.split("_")[-2:])
        claimed = [setting for setting in settings(pp, micro_batches) if setting.memory == entry.memory]
        assert len(claimed) == len(MESSAGES) * len(TIMES)
        assert all(setting.admits(entry.schedule) for setting in claimed)
        assert entry.name
        assert entry.author
        assert entry.link.startswith("https://")
