"""Formulas: class, FLOPs and bytes of JAX's primitives from the types of their operands.

Conventions are those of the ONNX importer and the zoo: a multiply-add counts two operations, an
elementary function (exp, tanh, erf, a division, a square root) one, moving data none. The taps of
a convolution that fall on padding, or between dilated inputs, are not counted, as XLA does: so a
convolution and its two gradients cost the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from egx.formats.jaxpr_flat import CALLS, body_of, scan_parts

# Threefry hashes two words in 20 rounds of an add, a rotation (three operations) and an
# exclusive or, with five injections of three additions (Salmon et al., SC 2011).
THREEFRY_FLOPS_PER_WORD = (20 * 5 + 5 * 3) / 2


class Use(NamedTuple):
    """A primitive with its parameters and the types of its operands and results."""

    name: str
    params: Mapping[str, Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def read(self, k: int = 0) -> int:
        """Elements of input k."""
        return math.prod(self.inputs[k].shape)

    @property
    def made(self) -> int:
        """Elements of the first output."""
        return math.prod(self.outputs[0].shape) if self.outputs else 0


class Cost(NamedTuple):
    """What an equation is and takes; `bytes` are the traffic of all iterations of a loop, None
    for what reads and writes its operands once. `unknown` counts primitives without a rule."""

    kind: str
    flops: float
    iterations: int | None = None
    bytes: float | None = None
    unknown: Counter[str] = Counter()  # noqa: RUF012  # never changed


def aval_bytes(aval: Any) -> int:
    """Bytes of an array; a random key counts the words that it consists of."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    elements = math.prod(aval.shape)
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return elements * int(itemsize)


def dot_flops(use: Use) -> float:
    """Each output sums over the contracted axes."""
    (contracted, _), _ = use.params["dimension_numbers"]
    return 2 * use.made * math.prod(use.inputs[0].shape[axis] for axis in contracted)


def ragged_dot_flops(use: Use) -> float:
    """Each row meets the matrix of its group."""
    return 2 * use.made * use.inputs[0].shape[-1]


def conv_flops(use: Use) -> float:
    """Each output meets the channels of its group at every place of the kernel that has data."""
    p, numbers = use.params, use.params["dimension_numbers"]
    lhs, rhs = use.inputs[0].shape, use.inputs[1].shape
    out = use.outputs[0].shape
    taps = 1
    for k in range(len(lhs) - 2):
        taps *= valid_taps(
            size=lhs[numbers.lhs_spec[2 + k]],
            window=rhs[numbers.rhs_spec[2 + k]],
            made=out[numbers.out_spec[2 + k]],
            stride=p["window_strides"][k],
            pad=p["padding"][k][0],
            base_dilation=p["lhs_dilation"][k],
            window_dilation=p["rhs_dilation"][k],
        )
    batch, features = (out[axis] for axis in numbers.out_spec[:2])
    return 2 * batch * features * rhs[numbers.rhs_spec[1]] * taps


def valid_taps(
    *,
    size: int,
    window: int,
    made: int,
    stride: int,
    pad: int,
    base_dilation: int = 1,
    window_dilation: int = 1,
) -> int:
    """Pairs of an output and a place of the kernel, along one axis, that meet an input."""
    place = np.arange(made)[:, None] * stride + np.arange(window)[None] * window_dilation - pad
    inside = (place >= 0) & (place < (size - 1) * base_dilation + 1)
    return int(np.count_nonzero(inside & (place % base_dilation == 0)))


def each_made(count: float = 1) -> Callable[[Use], float]:
    """So many operations an element of the first output."""
    return lambda use: count * use.made


def each_read(count: float = 1) -> Callable[[Use], float]:
    """So many operations an element of the first input."""
    return lambda use: count * use.read()


def integer_pow_flops(use: Use) -> float:
    """Squarings and multiplications, and a division for a negative power."""
    power = abs(use.params["y"])
    steps = max(power.bit_length() - 1, 0) + max(power.bit_count() - 1, 0)
    return use.made * (steps + (use.params["y"] < 0))


def window_flops(use: Use) -> float:
    """One operation an element of the window."""
    return use.made * math.prod(use.params["window_dimensions"])


def select_scatter_flops(use: Use) -> float:
    """The window is searched for each source, which is then added."""
    return use.read() * (math.prod(use.params["window_dimensions"]) + 1)


def sort_flops(use: Use) -> float:
    """n log2 n comparisons along the sorted axis, and as many for each further key."""
    n = use.inputs[0].shape[use.params.get("dimension", -1)] if use.inputs[0].shape else 1
    return use.read() * max(1, math.ceil(math.log2(max(n, 2)))) * use.params.get("num_keys", 1)


def top_k_flops(use: Use) -> float:
    """A heap of k: log2 k comparisons an element."""
    return use.read() * max(1, math.ceil(math.log2(max(use.params.get("k", 2), 2))))


def scatter_flops(use: Use) -> float:
    """One operation an update."""
    return math.prod(use.inputs[2].shape)


def fft_flops(use: Use) -> float:
    """The usual 5 n log2 n."""
    n = math.prod(use.params["fft_lengths"])
    return 5 * max(use.made, use.read()) * max(1, math.ceil(math.log2(max(n, 2))))


def random_flops(use: Use) -> float:
    """A hash a word."""
    words = sum(aval_bytes(aval) for aval in use.outputs) / 4
    return THREEFRY_FLOPS_PER_WORD * max(words, 1)


def cubic(count: float) -> Callable[[Use], float]:
    """A factorisation: so many times m n min(m, n) for each matrix (Golub and Van Loan, Matrix
    Computations)."""

    def flops(use: Use) -> float:
        shape = use.inputs[0].shape
        return count * math.prod(shape) * min(shape[-2:]) if len(shape) > 1 else 0.0

    return flops


def triangular_flops(use: Use) -> float:
    """A multiply-add for each element of the triangle and right side."""
    return use.read() * use.inputs[1].shape[-1 if use.params.get("left_side") else -2]


def none(use: Use) -> float:
    """Moves data only."""
    return 0.0


_ELEMENTWISE = """abs acos acosh add add_any add_jaxvals and asin asinh atan atan2 atanh cbrt ceil
    clz complex conj convert_element_type cos cosh div eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt imag is_finite le le_to log log1p logistic lt lt_to max min mul ne neg nextafter
    not or population_count pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    mulhi"""
# Short programs of their own; an estimate of the length of their series.
_SERIES = """bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma
    random_gamma_grad regularized_incomplete_beta zeta"""
SERIES_FLOPS = 20
_MOVED = """bitcast_convert_type broadcast_in_dim concatenate dynamic_slice dynamic_update_slice
    empty empty2 expand_dims gather iota pad random_unwrap random_wrap reshape rev scatter select
    platform_index slice squeeze stack split transpose unstack tile"""
_REDUCED = """argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and reduce_max
    reduce_min reduce_or reduce_prod reduce_sum reduce_xor"""

Rule = tuple[str, Callable[[Use], float]]


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name in _ELEMENTWISE.split():
        rules[name] = ("elementwise", each_made())
    for name in _SERIES.split():
        rules[name] = ("elementwise", each_made(SERIES_FLOPS))
    for name in _MOVED.split():
        rules[name] = ("shape", none)
    for name in _REDUCED.split():
        rules[name] = ("reduction", each_read())
    rules["clamp"] = rules["one_minus_square"] = ("elementwise", each_made(2))
    rules["integer_pow"] = ("elementwise", integer_pow_flops)
    rules["dot_general"] = ("contraction", dot_flops)
    rules["ragged_dot"] = rules["ragged_dot_general"] = ("contraction", ragged_dot_flops)
    rules["conv_general_dilated"] = ("contraction", conv_flops)
    for name in ("max", "min", "sum"):
        rules[f"reduce_window_{name}"] = ("reduction", window_flops)
    rules["reduce_window"] = ("reduction", window_flops)
    rules["select_and_gather_add"] = ("reduction", window_flops)
    for name in ("select_and_scatter", "select_and_scatter_add"):
        rules[name] = ("reduction", select_scatter_flops)
    for name in ("add", "mul", "sub", "min", "max"):
        rules[f"scatter_{name}"] = rules[f"scatter-{name}"] = ("shape", scatter_flops)
    rules["sort"] = ("reduction", sort_flops)
    rules["top_k"] = rules["approx_top_k"] = ("reduction", top_k_flops)
    rules["fft"] = ("reduction", fft_flops)
    for name in (
        *("threefry2x32", "random_bits", "random_seed", "random_split", "random_fold_in"),
        *("rng_bit_generator", "rng_uniform", "random_clone", "random_gamma"),
    ):
        rules[name] = ("elementwise", random_flops)
    for name, count in (
        *(("cholesky", 1 / 3), ("lu", 2 / 3), ("qr", 4 / 3), ("geqrf", 4 / 3), ("svd", 22.0)),
        *(("householder_product", 4 / 3), ("eigh", 9.0), ("eig", 25.0), ("schur", 25.0)),
        *(("hessenberg", 10 / 3), ("tridiagonal", 4 / 3)),
    ):
        rules[name] = ("opaque", cubic(count))
    rules["triangular_solve"] = ("opaque", triangular_flops)
    rules["tridiagonal_solve"] = ("opaque", each_made(8))
    for name in ("lu_pivots_to_permutation", "create_token", "after_all"):
        rules[name] = ("opaque", none)
    # Talk to the host; what that takes nobody knows.
    for name in ("debug_callback", "debug_print", "pure_callback", "io_callback"):
        rules[name] = ("opaque", none)
    return rules


RULES = _rules()


def cost_of(use: Use, *, while_iterations: int = 1) -> Cost:
    """Class, FLOPs and, of loops, the traffic of all iterations.

    A scan costs its length times its body; a while loop `while_iterations` times condition and
    body, for nobody knows how often it runs; a cond its dearest branch, which may be of another
    count than its others. Other primitives with a body cost that body once.
    """
    if use.name == "scan":
        return _scan_cost(use, while_iterations)
    if use.name == "while":
        return _while_cost(use, while_iterations)
    if use.name == "cond":
        branches = [_body_cost(b, while_iterations) for b in use.params["branches"]]
        dearest = max(branches, key=lambda cost: cost.flops)
        return dearest._replace(unknown=_all_unknown(branches))
    if use.name in RULES:
        kind, flops = RULES[use.name]
        return Cost(kind, float(flops(use)))
    bodies = [v for v in use.params.values() if isinstance(v, ClosedJaxpr | Jaxpr)]
    if not bodies:
        return Cost("opaque", 0.0, unknown=Counter([use.name]))
    costs = [_body_cost(body, while_iterations) for body in bodies]
    return Cost("opaque", sum(c.flops for c in costs), unknown=_all_unknown(costs))


def _body_cost(body: ClosedJaxpr | Jaxpr, while_iterations: int) -> Cost:
    """The sum over a body."""
    jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    costs = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            costs.append(_body_cost(body_of(eqn), while_iterations))
            continue
        use = Use(
            eqn.primitive.name,
            eqn.params,
            [atom.aval for atom in eqn.invars],
            [var.aval for var in eqn.outvars],
        )
        costs.append(cost_of(use, while_iterations=while_iterations))
    return Cost("opaque", sum(c.flops for c in costs), unknown=_all_unknown(costs))


def _all_unknown(costs: Sequence[Cost]) -> Counter[str]:
    return sum((cost.unknown for cost in costs), Counter())


def _scan_cost(use: Use, while_iterations: int) -> Cost:
    """The body reads constants and carry, and writes the carry, in each iteration."""
    length = use.params["length"]
    body = _body_cost(use.params["jaxpr"], while_iterations)
    first, last = scan_parts(use.params["jaxpr"], use.inputs, use.outputs)
    sizes = [aval_bytes(aval) for aval in use.inputs]
    carried = sum(sizes[first:last])
    rows = sum(sizes[last:]) + sum(aval_bytes(a) for a in use.outputs[last - first :])
    traffic = length * (sum(sizes[:first]) + 2 * carried) + rows
    return body._replace(flops=length * body.flops, iterations=length, bytes=float(traffic))


def _while_cost(use: Use, iterations: int) -> Cost:
    parts = [_body_cost(use.params[key], iterations) for key in ("cond_jaxpr", "body_jaxpr")]
    carried = sum(aval_bytes(aval) for aval in use.outputs)
    constants = sum(aval_bytes(aval) for aval in use.inputs) - carried
    return Cost(
        "opaque",
        iterations * sum(part.flops for part in parts),
        iterations,
        float(iterations * (constants + 2 * carried)),
        _all_unknown(parts),
    )
