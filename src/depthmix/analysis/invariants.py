"""Invariants of every mechanism, measured on this machine in a chosen dtype; no outside reference is needed.

`depthmix verify` prints these as a table, the tests run them for every mechanism and option, and a mechanism that
another package registers gets them too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.analysis.routes import replaces_weights
from depthmix.analysis.trace import Trace, trace
from depthmix.mechanisms import DepthStack, State, param_groups

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
ONES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}  # M itself is float32


@dataclass(frozen=True)
class Check:
    """One measured claim. It holds if the error is a number of at most `bound`."""

    name: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound


@dataclass
class Probe:
    """A small network around one stack: random sublayers of unit scale, random tokens, perturbed parameters."""

    stack: DepthStack
    x: Tensor
    sublayers: list[Callable[[Tensor], Tensor]]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def run(self, stack: DepthStack | None = None) -> Tensor:
        out: Tensor = (stack or self.stack)(self.x, self.sublayers)
        return out

    def states(self) -> list[State]:
        """The state before each site, the output's included."""
        states = [self.stack.begin(self.x)]
        for mixer, sublayer in self.stack.pairs(self.sublayers):
            states.append(mixer.step(states[-1], sublayer))
        return states


def make_probe(
    name: str,
    options: Mapping[str, Any],
    *,
    dim: int = 8,
    depth: int = 7,
    tokens: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    seed: int = 0,
    spread: float | None = None,
) -> Probe:
    """`spread` is the size of the noise added to the parameters; 0 keeps their initial values."""
    spread = (0.1 if dtype.itemsize == 2 else 0.5) if spread is None else spread  # half precision overflows easily
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    noise = functools.partial(torch.randn, generator=generator, dtype=wide)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stack = DepthStack(name, dim=dim, depth=depth, **options).to(device, wide)
        stack.reset_parameters()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(spread * noise(parameter.shape).to(device))
    weights = [(noise(dim, dim) / dim**0.5).to(device) for _ in range(depth)]
    sublayers: list[Callable[[Tensor], Tensor]] = [functools.partial(sublayer, weight) for weight in weights]
    return Probe(stack, noise(*tokens, dim).to(device, dtype), sublayers)


def sublayer(weight: Tensor, h: Tensor) -> Tensor:
    """Not scale-invariant and not odd, so that no gradient vanishes by symmetry; acts on each token separately."""
    return (torch.tanh(h.to(weight.dtype) @ weight) + 0.3 * torch.cos(h.to(weight.dtype))).to(h.dtype)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry if that exceeds 1."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    error = (a - b).abs().max() / b.abs().max().clamp(min=1)
    return float(error) if torch.isfinite(error) else float("inf")


def check_rebuild(probe: Probe, traced: Trace) -> Iterator[Check]:
    wide = torch.promote_types(probe.dtype, torch.float32)
    error = max(
        distance(traced.contributions(r).to(wide).sum(0), traced.inputs[r].to(wide)) for r in range(len(traced.inputs))
    )
    yield Check("h equals the sum of M v in every row", error, TOLERANCE[probe.dtype])


def check_paths(probe: Probe, traced: Trace) -> Iterator[Check]:
    with torch.no_grad():
        states = probe.states()
        mixers = probe.stack.all_mixers()
        reads = [
            distance(m.read(s)[0], m.combine(s[: m.expects.essential], m.coeff(s[: m.expects.essential])))
            for m, s in zip(mixers, states, strict=True)
        ]
        yield Check("read equals combine(coeff)", max(reads), TOLERANCE[probe.dtype])
        error = distance(probe.run(), traced.inputs[-1])
        yield Check("the model's output equals the trace's", error, TOLERANCE[probe.dtype])


def check_start(name: str, options: Mapping[str, Any], probe: Probe) -> Iterator[Check]:
    """Whether M starts as declared by `preserves_prenorm`: all ones, constant along each row, or neither."""
    initial = make_probe(name, options, dtype=probe.dtype, device=probe.x.device, spread=0, **probe_sizes(probe))
    claim = initial.stack.facts.preserves_prenorm
    traced = trace(initial.stack, initial.x, initial.sublayers)
    n = traced.M.shape[-1]
    lower = torch.ones(n, n, dtype=traced.M.dtype, device=traced.M.device).tril()
    exact = float((traced.M - lower).abs().max())
    first = traced.M[..., :1]
    scaled = float((traced.M / first - lower).abs().max()) if first.abs().min() > 0 else float("inf")
    bound = ONES[probe.dtype]
    if claim == "exact":
        yield Check("starts as PreNorm: M is all ones", exact, bound)
    elif claim == "up to scale":
        yield Check("starts as PreNorm up to scale", scaled, bound)
        yield Check("does not start as PreNorm exactly, as declared", float(exact <= bound), 0)
    else:
        yield Check("does not start as PreNorm, as declared", float(scaled <= bound), 0)


def check_facts(probe: Probe, traced: Trace) -> Iterator[Check]:
    facts = probe.stack.facts
    count = sum(p.numel() for p in probe.stack.parameters())
    yield Check(f"has {facts.parameters} parameters", abs(count - facts.parameters), 0)
    error = distance(traced.inputs[0], traced.sources[0])
    yield Check("the read of a single source equals that source, for any parameters", error, TOLERANCE[probe.dtype])
    grouped = {id(p) for group in param_groups(probe.stack) for p in group["params"]}
    yield Check("param_groups contains every parameter", len({id(p) for p in probe.stack.parameters()} ^ grouped), 0)
    if facts.row_sums is not None:
        expected = torch.tensor(facts.row_sums, dtype=traced.M.dtype, device=traced.M.device)
        error = distance(traced.row_sums(), expected.expand(traced.M.shape[:-1]))
        yield Check("row sums are as declared", error, TOLERANCE[probe.dtype])
    if facts.rank is not None:
        excess = int(traced.rank().max()) - facts.rank
        yield Check(f"semiseparable rank is at most {facts.rank}", max(excess, 0), 0)


def check_meta(name: str, options: Mapping[str, Any], probe: Probe) -> Iterator[Check]:
    """Parameters without storage: `list`, `show` and `train` count them before memory is allocated."""
    shapes = {key: p.shape for key, p in probe.stack.named_parameters()}
    try:
        with torch.device("meta"):
            stack = DepthStack(name, dim=probe.stack.dim, depth=probe.stack.depth, **options)
        reason = (
            "" if {key: p.shape for key, p in stack.named_parameters()} == shapes else ": its parameters differ there"
        )
    except Exception as error:  # the name of the check reports it
        cause = error.__cause__ or error
        reason = f": {type(cause).__name__}: {cause}"
    yield Check(f"builds on the meta device, as `list`, `show` and `train` require{reason}", float(bool(reason)), 0)


def check_weights(probe: Probe, traced: Trace) -> Iterator[Check]:
    """Of mechanisms that weight a list of sources: their weights can be taken out of the coefficients and put back."""
    errors = []
    with torch.no_grad():
        for mixer, c in zip(probe.stack.all_mixers(), traced.coefficients, strict=True):
            given = mixer.source_weights(c)
            if given is not None and len(given.names) > 1 and replaces_weights(mixer):
                again = mixer.source_weights(mixer.with_weights(c, given.weights))
                errors.append(float("inf") if again is None else distance(again.weights, given.weights))
    if errors:
        yield Check("weights over sources can be replaced", max(errors), TOLERANCE[probe.dtype])


def check_spec(probe: Probe) -> Iterator[Check]:
    with torch.no_grad():
        states = probe.states()
    lead = probe.x.shape[:-1]
    wrong_shapes = unsealed = wrong_dtypes = 0
    for index, state in enumerate(states):
        spec = probe.stack.spec(index)
        wrong_shapes += [tuple(t.shape) for t in state] != [(*lead, *shape) for shape in spec.shapes[: len(state)]]
        wrong_shapes += not spec.essential <= len(state) <= len(spec.shapes)
        wrong_dtypes += sum(t.dtype != probe.dtype for t in state[: spec.essential])
        for later in states[index + 1 :]:
            unsealed += sum(not torch.equal(a, b) for a, b in zip(state[: spec.sealed], later, strict=False))
    yield Check("spec gives the shapes of every state", wrong_shapes, 0)
    yield Check("sealed tensors never change", unsealed, 0)
    yield Check("the state keeps the stream's dtype", wrong_dtypes, 0)


def check_slices(probe: Probe) -> Iterator[Check]:
    """Cut at every site and resume: from the full state bit for bit, from its essential part up to rounding."""
    with torch.no_grad():
        whole = probe.run()
        changed, dropped = 0, 0.0  # cuts that change bits; the largest error without derived tensors
        for cut, state in enumerate(probe.states()):
            if not 0 < cut < len(probe.stack):
                continue
            head, tail = probe.stack.slice(0, cut), probe.stack.slice(cut, len(probe.stack))
            changed += not torch.equal(resume(tail, tuple(t.clone() for t in state), probe), whole)
            sent = head.begin(probe.x)
            for mixer, f in head.pairs(probe.sublayers[:cut]):
                sent = mixer.step(sent, f)
            for essential in (sent, state[: probe.stack.spec(cut).essential]):
                dropped = max(dropped, distance(resume(tail, essential, probe), whole))
    yield Check("cut at any site and resumed: identical bits", changed, 0)
    yield Check("cut at any site and resumed without derived tensors", dropped, TOLERANCE[probe.dtype])


def resume(tail: DepthStack, state: State, probe: Probe) -> Tensor:
    for mixer, f in tail.pairs(probe.sublayers[tail.lo :]):
        state = mixer.step(state, f)
    return tail.end(state)


def check_locality(probe: Probe) -> Iterator[Check]:
    with torch.no_grad():
        batched = probe.run().flatten(0, -2)
        tokens = probe.x.flatten(0, -2)
        single = torch.stack([probe.stack(token, probe.sublayers) for token in tokens])
    yield Check("tokens are independent, for any leading shape", distance(single, batched), TOLERANCE[probe.dtype])


def check_gradients(probe: Probe) -> Iterator[Check]:
    stack = probe.stack
    plain = gradients(stack, probe, lambda mixer, f, state: mixer.step(state, f))
    dead = [name for name, g in plain.items() if g is None or not g.abs().max() > 0]
    missing = f" (missing: {', '.join(dead)})" if dead else ""
    yield Check(f"every parameter gets a gradient{missing}", len(dead), 0)

    def checkpointed_step(mixer: Any, f: Any, state: State) -> State:
        out: State = checkpoint(lambda *s: mixer.step(s, f), *state, use_reentrant=False)
        return out

    recomputed = gradients(copy.deepcopy(stack), probe, checkpointed_step)
    error = max((distance(recomputed[n], g) for n, g in plain.items() if g is not None), default=0.0)
    yield Check("gradients are the same under activation checkpointing", error, TOLERANCE[probe.dtype])


def gradients(stack: DepthStack, probe: Probe, step: Callable[[Any, Any, State], State]) -> dict[str, Any]:
    stack.zero_grad(set_to_none=True)
    x = probe.x.clone().requires_grad_()
    state = stack.begin(x)
    for mixer, f in stack.pairs(probe.sublayers):
        state = step(mixer, f, state)
    out = stack.end(state)
    weights = torch.linspace(-1, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
    (out * weights + out.square()).mean().backward()
    return {"x": x.grad, **{name: p.grad for name, p in stack.named_parameters()}}


def check_twins(name: str, options: Mapping[str, Any], probe: Probe) -> Iterator[Check]:
    """Options with which a mechanism equals another one, parameter for parameter."""
    for twin_options, other, other_options in type(probe.stack[0]).twins:
        if twin_options != options:
            continue
        twin = make_probe(other, other_options, dtype=probe.dtype, device=probe.x.device, **probe_sizes(probe))
        twin.stack.load_converted(probe.stack.state_dict())
        with torch.no_grad():
            error = distance(probe.run(), probe.run(twin.stack))
            yield Check(f"equals {other} with the same parameters", error, TOLERANCE[probe.dtype])


def probe_sizes(probe: Probe) -> dict[str, Any]:
    return {"dim": probe.stack.dim, "depth": probe.stack.depth, "tokens": tuple(probe.x.shape[:-1])}


def verify(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    **sizes: Any,
) -> list[Check]:
    """Measure every invariant of one mechanism with one set of options."""
    options = options or {}
    probe = make_probe(name, options, dtype=dtype, device=device, **sizes)
    traced = trace(probe.stack, probe.x, probe.sublayers)
    return [
        *check_rebuild(probe, traced),
        *check_paths(probe, traced),
        *check_start(name, options, probe),
        *check_facts(probe, traced),
        *check_meta(name, options, probe),
        *check_weights(probe, traced),
        *check_spec(probe),
        *check_slices(probe),
        *check_locality(probe),
        *check_gradients(probe),
        *check_twins(name, options, probe),
    ]
