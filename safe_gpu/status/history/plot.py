"""Plots of what a host was used for."""

import io
import warnings
from datetime import date
from statistics import fmean

from .report import Days, percentile_95


def draw(days: Days, form: str) -> bytes:
    """Return the picture: GPU-hours by user, stacked by day, and below them how long claims waited.

    Args:
        form: "svg" or "png".

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [date.fromisoformat(name) for name in days.names]
    file = io.BytesIO()
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():  # a user's name is no formula
        warnings.simplefilter("ignore")  # the font may lack a letter of it
        figure = Figure(figsize=(10, 6), layout="constrained")
        use, wait = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        below = [0.0] * len(names)
        for user, hours in days.used.items():
            label = f" {user}" if user.startswith("_") else user  # legends leave such labels out
            use.bar(names, hours, bottom=below, label=label)
            below = [low + more for low, more in zip(below, hours, strict=True)]
        use.set_ylabel("GPU-hours a day")
        use.legend(loc="upper left", bbox_to_anchor=(1, 1))
        began = [date.fromisoformat(name) for name in days.waits]
        wait.plot(began, [fmean(some) / 60 for some in days.waits.values()], "o", label="mean")
        wait.plot(began, [percentile_95(some) / 60 for some in days.waits.values()], "^", label="95%")
        wait.set_ylabel("wait (min)")
        wait.set_ylim(bottom=0)
        wait.legend(loc="upper left", bbox_to_anchor=(1, 1))
        wait.tick_params("x", rotation=30)
        figure.savefig(file, format=form)
    return file.getvalue()
