"""Shows the progress of training on rank 0: a live bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 10  # steps between two lines if there is no terminal


class StepProgress:
    """Shows the loss, tokens per second and memory of every rank; only the first rank shows anything.

    Args:
        steps: the number of steps to come.
        is_shown: whether this rank shows the progress.

    Example:
        with StepProgress(120, is_shown=rank == 0) as progress:
            progress.update(loss=9.01, tokens_per_s=1500.0, memory=[2**29] * 4)
    """

    def __init__(self, steps: int, *, is_shown: bool) -> None:
        self._console = Console(quiet=not is_shown)
        self._steps, self._done = steps, 0
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not is_shown or not self._console.is_terminal,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=steps, status="")

    def __enter__(self) -> StepProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, *, loss: float, tokens_per_s: float, memory: list[int]) -> None:
        """Show that one step is done. ``memory`` is in bytes, one entry per rank."""
        self._done += 1
        megabytes = "|".join(f"{size / 1e6:.0f}" for size in memory)
        status = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  memory {megabytes} MB"
        self._progress.update(self._task, completed=self._done, status=status)
        if not self._console.is_terminal and (self._done % LINE_EVERY == 0 or self._done in (1, self._steps)):
            self._console.print(f"step {self._done}/{self._steps}  {status}", soft_wrap=True)
