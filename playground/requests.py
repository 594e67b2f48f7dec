"""What the page's controls ask for: a schedule (hand-made, searched or the reader's own) and the times of actions."""

import contextlib
import dataclasses
import functools
import inspect
import json
import linecache
import math
import traceback
from collections.abc import Iterator

from picotron.console import UserError
from playground.drawing import Structure
from workbench.pipelines.layouts import count_layers, count_stages, parse_stages
from workbench.schedules import actions, schedules
from workbench.schedules.actions import Action, AnyAction, Overlapped, rank_of
from workbench.schedules.checker import check
from workbench.schedules.schedule_csv import arrange, parse_csv
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.search import Found, Shape, fastest_schedule, shapes
from workbench.schedules.simulate import Costs

EDITOR = "<editor>"
MAX_ACTIONS = 2**15  # of the reader's own schedule, so that the page stays fast


class FieldError(UserError):
    """A mistake in one control of the page, next to which its message appears."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@contextlib.contextmanager
def of_field(name: str) -> Iterator[None]:
    """Raise a UserError of this block as the mistake of a control."""
    try:
        yield
    except UserError as error:
        raise FieldError(name, str(error)) from None


@dataclasses.dataclass(frozen=True)
class Request:
    """The state of the controls. Times are in forwards of one micro-batch on one rank, activations in micro-batches.

    Args:
        schedule: a key of SCHEDULES, auto, csv or python.
        text: the schedule itself if it is csv or python.
        pp: number of ranks, except of a schedule csv, which has a line for each.
        chunks, group_size: 0 for the schedule's default; ignored by schedules that leave no choice.
        message: latency of a message between ranks.
        transfer: time in which a message occupies the link between two ranks.
        overlapped: time of an overlapped pair, as a fraction of F + B.
        first, last: additional time of the first and of the last stage, as that of the embedding and of the head.
        layout: the layers of each stage, in the notation of workbench/pipelines/layouts.py; empty for equal stages.
        factors: a factor for the time of each stage, or of each rank, separated by spaces; empty for none.
        memory: the most activations of a rank; 0 for no limit.
        deferred: fraction of the activations that is kept between I and W.
    """

    schedule: str = "1f1b"
    text: str = ""
    pp: int = 4
    micro_batches: int = 8
    chunks: int = 0
    group_size: int = 0
    F: float = Costs.F
    B: float = Costs.B
    I: float = Costs.I  # noqa: E741
    W: float = Costs.W
    message: float = Costs.p2p
    transfer: float = Costs.transfer
    overlapped: float = Costs.overlapped
    first: float = 0.0
    last: float = 0.0
    layout: str = ""
    factors: str = ""
    memory: float = 0.0
    deferred: float = 1.0

    @classmethod
    def of(cls, text: str) -> "Request":
        """Read a request from JSON."""
        return cls(**json.loads(text))


def layout_sizes(layout: str, pp: int, chunks: int) -> list[float]:
    """Return the size of each stage, in layers; the mean of the ranks is 1.

    Args:
        layout: see `Request`.

    Raises:
        FieldError: the layout is not in its notation, has no layers, or has another number of stages.
    """
    if not layout:
        return [1 / chunks] * (pp * chunks)
    with of_field("layout"):
        layers = count_layers(layout)
        stages = parse_stages(layout, layers, pp * chunks)
        if not layers:
            raise UserError(f"pp_layout={layout!r} has no layers (t)")
    return [pp * len(stage.layers) / layers for stage in stages]


def stage_costs(request: Request, pp: int, shape: Shape) -> Costs:
    """Return the times of the stages: their `layout_sizes`, and what `first`, `last` and `factors` add.

    Raises:
        FieldError: the layout does not fit, or `factors` are not numbers above 0, or are neither one for each rank nor
            one for each stage.
    """
    chunks, placement = shape
    weights = layout_sizes(request.layout, pp, chunks)
    weights[0] += request.first
    weights[-1] += request.last
    try:
        factors = [float(word) for word in request.factors.replace(",", " ").split()]
    except ValueError:
        factors = [math.nan]
    if not all(0 < factor < math.inf for factor in factors):
        raise FieldError("factors", f"the factors {request.factors!r} are not numbers above 0, separated by spaces")
    if len(factors) == pp:
        factors = [factors[rank_of(stage, pp, placement)] for stage in range(pp * chunks)]
    if len(factors) not in (0, len(weights)):
        stages = f", or {len(weights)}, one for each stage" if chunks > 1 else ""
        raise FieldError("factors", f"there are {len(factors)} factors; write {pp}, one for each pp rank{stages}")
    weights = [weight * factor for weight, factor in zip(weights, factors or [1.0] * len(weights), strict=True)]
    times = request.F, request.B, request.I, request.W
    return Costs(*times, overlapped=request.overlapped, p2p=request.message, transfer=request.transfer, weights=weights)


def structure(request: Request) -> Structure:
    """Return the schedule that a request names. Those that do not depend on times are kept for the next request.

    Raises:
        UserError: there is a fault in the schedule, or the numbers do not suit it.
    """
    if request.schedule == "auto":
        found = searched(request)
        sizes = layout_sizes(request.layout, request.pp, found.schedule.chunks)
        return Structure.of(found.name, found.schedule, request.deferred, sizes)
    numbers = request.pp, request.micro_batches, request.chunks, request.group_size
    return _built(request.schedule, request.text, *numbers, request.deferred, request.layout)


def searched(request: Request) -> Found:
    """Search for the fastest schedule within the limit of memory; without one, a rank can hold all micro-batches."""
    pp, layout = request.pp, request.layout
    with of_field("layout"):
        chunks = count_stages(layout) // pp or 1 if layout else request.chunks
    options = {shape: stage_costs(request, pp, shape) for shape in shapes(chunks or None)}
    sizes = layout_sizes(layout, pp, chunks) if layout else None
    memory = request.memory or request.micro_batches * (chunks * max(sizes) if sizes else 1)
    return fastest_schedule(pp, request.micro_batches, memory, options, request.deferred, sizes=sizes)


@functools.lru_cache(maxsize=16)
def _built(
    name: str, text: str, pp: int, micro_batches: int, chunks: int, group_size: int, deferred: float, layout: str
) -> Structure:
    if name in ("csv", "python"):
        programs = (
            parse_csv(text, "in the editor") if name == "csv" else own_programs(text, pp, micro_batches, chunks or 2)
        )
        if (count := sum(map(len, programs))) > MAX_ACTIONS:
            raise UserError(f"the schedule has {count:,} actions; the playground draws at most {MAX_ACTIONS:,}")
        schedule = arrange(programs, "in the editor")
        check(schedule)
    else:
        recipe = SCHEDULES.get(name, SCHEDULES["1f1b"])
        group = group_size if recipe.has_groups and group_size else None
        schedule = build(name, pp, micro_batches, chunks if recipe.any_chunks and chunks else None, group)
    return Structure.of(name, schedule, deferred, layout_sizes(layout, schedule.pp, schedule.chunks))


def own_programs(text: str, pp: int, micro_batches: int, chunks: int) -> list[list[AnyAction]]:
    """Run a reader's Python, whose last function returns the program of one rank, like those in schedules.py.

    Raises:
        UserError: the text has no such function, or it raises an error; the message names the line.
    """
    linecache.cache[EDITOR] = (len(text), None, text.splitlines(keepends=True), EDITOR)  # for tracebacks
    namespace = {**vars(actions), **vars(schedules), "__name__": EDITOR}
    try:
        exec(compile(text, EDITOR, "exec"), namespace)
        own = [each for each in namespace.values() if inspect.isfunction(each) and each.__code__.co_filename == EDITOR]
        if not own:
            raise UserError("there is no function; write one like: def mine(rank, pp, micro_batches): ...")
        options = {"chunks": chunks} if "chunks" in inspect.signature(own[-1]).parameters else {}
        programs = [own[-1](rank, pp, micro_batches, **options) for rank in range(pp)]
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"line {error.lineno}: {error.msg}") from None
    except Exception as error:  # whatever a reader's code may raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == EDITOR]
        where = f"line {lines[-1]}: " if lines else ""
        raise UserError(f"{where}{type(error).__name__}: {error}") from None
    for rank, program in enumerate(programs):
        if not isinstance(program, list) or not all(isinstance(each, Action | Overlapped) for each in program):
            raise UserError(f"{own[-1].__name__} returns {program!r:.60} for pp rank {rank}; it must return a Program")
    return programs
