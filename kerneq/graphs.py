"""A model in evaluation as CUDA graphs, one for every shape of input: hundreds of launches become one."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from .equilibrium import layers_of
from .operators import AbstractOperator
from .solution import Solution
from .tensors import map_tensors, version

MARGIN = 1.25  # times the steps that a batch took are in the graph, so that most others need no more


def capture(model: nn.Module, example: Tensor | None = None) -> "Captured":
    """The same model as CUDA graphs, for evaluation: called like the model, `solutions=True` included.

        fast = kerneq.capture(model.eval(), x)
        with torch.no_grad():
            logits = fast(x)

    A shape is captured when it is seen for the second time, that of `example` at once. A graph cannot look at a
    residual, so it takes a fixed number of steps in every layer: a quarter more than the first batch needed. The
    residuals of every batch are looked at after it: where a sample has not converged, the batch is run again as it is,
    and the graph made anew with more steps. Weights that were changed in place are seen by the same graph, others and
    other settings of the layers by a new one. (PyTorch counts the changes; one made by another CUDA graph is not
    counted: call `train()` and `eval()` after it, for the norms of the weights.) The `steps` of a solution are those of
    the graph. On a CPU, in `train()`, with gradients, under `equilibrium.watching`, or where a layer warns or raises on
    failure, the model runs as it is.
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
    """A captured call: replay it after writing `x`, then read `output`."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    output: Any
    missed: Tensor | None  # whether a sample of a layer has not converged; None where no layer could do better


@final
class Captured(nn.Module):
    """What `capture` gives."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.layers = layers_of(model)
        self.operators = [module for module in model.modules() if isinstance(module, AbstractOperator)]
        self.steps = [0] * len(self.layers)  # that each layer takes in a graph
        self.graphs: dict[Any, Graph | None] = {}  # None: seen once
        self.weights: list[tuple[int, int]] = []
        self.refused = False
        self.train(model.training)

    def forward(self, x: Tensor, solutions: bool | None = None) -> Any:
        if not self._fits(x):
            return self._call(x, solutions)
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        rules = tuple((layer.solver, layer.gradient) for layer in self.layers)  # an unrolled layer is its steps
        limits = tuple((layer.tol, layer.max_steps, layer.check_every) for layer in self.layers)
        given = (x.shape, x.stride(), x.dtype, x.device)
        key = (*given, autocast, torch.is_inference_mode_enabled(), solutions, rules, limits)
        places = self._places()
        if places != self.weights or not all(operator.settled for operator in self.operators):
            if [address for address, _ in places] != [address for address, _ in self.weights]:
                self.graphs.clear()
            # A graph reads the weights anew at every replay, but holds no search for the vectors of their norms.
            for operator in self.operators:
                operator.settle()
            self.weights = self._places()
        graph = self.graphs.get(key)
        if graph is None and key in self.graphs:
            graph = self.graphs[key] = self._record(x, solutions)
        if graph is not None:
            graph.x.copy_(x)
            graph.graph.replay()
            if graph.missed is None or not bool(graph.missed):
                return map_tensors(torch.clone, graph.output)
            self.steps = [math.ceil(MARGIN * steps) for steps in self.steps]
        with self._watched() as found:
            output = self._call(x, solutions)
        for index, solution in found.items():
            taken = math.ceil(MARGIN * int(solution.steps.max()))
            self.steps[index] = min(max(self.steps[index], taken), self.layers[index].max_steps)
        self.graphs[key] = None
        # Read afterwards: the first call settles the norms of the weights.
        self.weights = self._places()
        return output

    def _places(self) -> list[tuple[int, int]]:
        """Where the numbers of the model lie, and how often each was changed."""
        vectors = [operator.tracker.vector for operator in self.operators]
        tensors = (*self.model.parameters(), *self.model.buffers(), *vectors)
        return [(t.data_ptr(), version(t)) for t in tensors]

    def _fits(self, x: Tensor) -> bool:
        """Whether a graph may take the place of the model."""
        if self.refused or not isinstance(x, Tensor) or not x.is_cuda:
            return False
        quiet = all(layer.on_failure == "return" and layer.look is None for layer in self.layers)
        return quiet and not (
            self.model.training or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing()
        )

    def _call(self, x: Tensor, solutions: bool | None) -> Any:
        return self.model(x) if solutions is None else self.model(x, solutions=solutions)

    def _record(self, x: Tensor, solutions: bool | None) -> Graph | None:
        """The call as a graph; None, from now on and with a warning, where that cannot be."""
        x = x.clone()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.clear_autocast_cache()  # a weight that was converted outside the graph is not kept for it
        try:
            most = [layer.max_steps for layer in self.layers]
            with self._fixed(), self._watched() as found:
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
    def _fixed(self) -> Iterator[None]:
        """Every layer takes its fixed number of steps and looks at nothing."""
        before = [(layer.max_steps, layer.check_every) for layer in self.layers]
        for layer, steps in zip(self.layers, self.steps, strict=True):
            layer.max_steps = layer.check_every = min(steps, layer.max_steps)
        try:
            yield
        finally:
            for layer, (max_steps, check_every) in zip(self.layers, before, strict=True):
                layer.max_steps, layer.check_every = max_steps, check_every

    @contextmanager
    def _watched(self) -> Iterator[dict[int, Solution]]:
        """The last solution of each layer that was called, by its place in `layers`."""
        found: dict[int, Solution] = {}

        def watch(index: int) -> Any:
            return self.layers[index].register_forward_hook(lambda _, inputs, output: found.update({index: output}))

        hooks = [watch(index) for index in range(len(self.layers))]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
