"""A model in evaluation as CUDA graphs, one for every shape of input: hundreds of launches become one."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from .equilibrium import is_pending, layers_of
from .operators import Operator, find_place
from .solution import Solution
from .tensors import map_tensors

MARGIN = 1.25  # times the steps that a batch took are in the graph, so that most others need no more


def capture(model: nn.Module, example: Tensor | None = None) -> "Captured":
    """The same model as CUDA graphs, for evaluation: called like the model, `solutions=True` included.

        fast = kerneq.capture(model.eval(), x)
        with torch.no_grad():
            logits = fast(x)

    A shape is captured when it is seen for the second time, that of `example` at once. A graph takes a fixed number of
    steps in every layer, a quarter more than the first batch needed; its solutions state them. Where a sample has not
    converged, the batch is run again without a graph, and the next graph has more steps. Weights that were changed in
    place are seen by the same graph, unless another CUDA graph changed them: call `train()` and `eval()` after that.
    Other weights and other settings of the layers get a new graph. On a CPU, in `train()`, with gradients, under
    `equilibrium.hook_solves`, or where a layer warns or raises on failure, the model runs without graphs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}.")
    captured = Captured(model)
    if example is not None:
        with torch.no_grad():
            for _ in range(2):
                captured(example)
    return captured


@dataclasses.dataclass
class Graph:
    """A captured call."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    output: Any
    missed: Tensor | None  # whether a sample of a layer has not converged; None where no layer could do better

    def replay(self, x: Tensor) -> bool:
        """Write `output` for x; returns whether it is as good as the model's own."""
        self.x.copy_(x)
        self.graph.replay()
        return self.missed is None or not bool(self.missed)


@final
class Captured(nn.Module):
    """The model as CUDA graphs, made by `capture`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.layers = layers_of(model)
        self.operators = [module for module in model.modules() if isinstance(module, Operator)]
        self.steps = [0] * len(self.layers)  # that each layer takes in a graph
        self.graphs: dict[Any, Graph | None] = {}  # None: seen once
        self.weights: list[tuple[int, int]] = []
        self.refused = False
        self.train(model.training)

    def forward(self, x: Tensor, solutions: bool | None = None) -> Any:
        if not self._fits(x):
            return self._call(x, solutions)
        self._follow_weights()
        key = self._key(x, solutions)
        graph = self.graphs.get(key)
        if graph is None and key in self.graphs:
            graph = self.graphs[key] = self._record(x, solutions)
        if graph is not None:
            if graph.replay(x):
                return map_tensors(torch.clone, graph.output)
            self.steps = [math.ceil(MARGIN * steps) for steps in self.steps]
        output = self._count_steps(x, solutions)
        self.graphs[key] = None
        # Read afterwards: the first call settles the norms of the weights.
        self.weights = self._places()
        return output

    def _key(self, x: Tensor, solutions: bool | None) -> tuple[Any, ...]:
        """Return all that a graph depends on beside the numbers of x and the weights."""
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        rules = tuple((layer.solver, layer.gradient) for layer in self.layers)  # an unrolled layer is its steps
        limits = tuple((layer.tol, layer.max_steps, layer.check_every) for layer in self.layers)
        given = (x.shape, x.stride(), x.dtype, x.device)
        return (*given, autocast, torch.is_inference_mode_enabled(), solutions, rules, limits)

    def _follow_weights(self) -> None:
        """Settle the norms of weights that were changed in place; forget the graphs of those that lie elsewhere now."""
        places = self._places()
        if places == self.weights and all(operator.settled for operator in self.operators):
            return
        if [address for address, _ in places] != [address for address, _ in self.weights]:
            self.graphs.clear()
        # A graph reads the weights anew at every replay, but holds no search for the vectors of their norms.
        for operator in self.operators:
            operator.settle()
        self.weights = self._places()

    def _count_steps(self, x: Tensor, solutions: bool | None) -> Any:
        """Call the model as it is, and set how many steps each layer takes in the next graph."""
        with self._collect_solutions() as found:
            output = self._call(x, solutions)
        for index, solution in found.items():
            taken = math.ceil(MARGIN * int(solution.steps.max()))
            self.steps[index] = min(max(self.steps[index], taken), self.layers[index].limits.max_steps)
        return output

    def _places(self) -> list[tuple[int, int]]:
        """Return the address of each tensor of the model and how often it was changed."""
        vectors = [operator.tracker.vector for operator in self.operators]
        tensors = (*self.model.parameters(), *self.model.buffers(), *vectors)
        return [find_place(t) for t in tensors]

    def _fits(self, x: Tensor) -> bool:
        """Whether a graph may take the place of the model for this input."""
        if self.refused or not isinstance(x, Tensor) or not x.is_cuda:
            return False
        quiet = all(layer.on_failure in (None, "return") and layer.solve_hook is None for layer in self.layers)
        return quiet and not (
            is_pending() or self.model.training or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing()
        )

    def _call(self, x: Tensor, solutions: bool | None) -> Any:
        return self.model(x) if solutions is None else self.model(x, solutions=solutions)

    def _record(self, x: Tensor, solutions: bool | None) -> Graph | None:
        """Return the call as a graph; None, with a warning and from now on, where it cannot be captured."""
        x = x.clone()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.clear_autocast_cache()  # a weight that was converted outside the graph is not kept for it
        try:
            most = [layer.limits.max_steps for layer in self.layers]
            with self._fix_steps(), self._collect_solutions() as found:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._call(x, solutions)
                torch.cuda.current_stream().wait_stream(stream)
                torch.clear_autocast_cache()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    output = self._call(x, solutions)
                    short = [s for i, s in found.items() if self.steps[i] < most[i]]
                    missed = torch.stack([~s.converged.all() for s in short]).any() if short else None
        except RuntimeError as error:
            self.refused = True
            # A capture that failed leaves the random numbers of the device waiting for its end.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            reason = str(error).splitlines()[0]
            warnings.warn(f"The model is not captured and runs as it is: {reason}", RuntimeWarning, stacklevel=4)
            return None
        finally:
            torch.clear_autocast_cache()
        return Graph(graph, x, output, missed)

    @contextmanager
    def _fix_steps(self) -> Iterator[None]:
        """Let every layer take its fixed number of steps, without residual checks."""
        before = [(layer.max_steps, layer.check_every) for layer in self.layers]
        for layer, steps in zip(self.layers, self.steps, strict=True):
            layer.max_steps = layer.check_every = min(steps, layer.limits.max_steps)
        try:
            yield
        finally:
            for layer, (max_steps, check_every) in zip(self.layers, before, strict=True):
                layer.max_steps, layer.check_every = max_steps, check_every

    @contextmanager
    def _collect_solutions(self) -> Iterator[dict[int, Solution]]:
        """Collect the last solution of each layer that is called, by its index in `layers`."""
        found: dict[int, Solution] = {}

        def watch(index: int, layer: nn.Module) -> Any:
            return layer.register_forward_hook(lambda _, inputs, output: found.update({index: output}))

        hooks = [watch(index, layer) for index, layer in enumerate(self.layers)]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
