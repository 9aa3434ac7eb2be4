"""Views: tensors that share memory with another, and the few functions that look like views and are none."""

from __future__ import annotations

from tests.fuzz.program import BATCH, Variable
from tests.fuzz.scope import Scope, Shape, batch_first, given_float
from tests.parameters import listed


def _splittable(v: Variable) -> bool:
    return batch_first(v) and any(n >= 2 and n % 2 == 0 for n in v.shape[1:])


def _even_dim(scope: Scope, v: Variable) -> int:
    return scope.choices.pick([i for i, n in enumerate(v.shape) if i > 0 and n >= 2 and n % 2 == 0])


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


@given_float(_splittable)
def piece(scope: Scope, x: Variable) -> bool:
    """A part along one dim, in one of the many ways to write it."""
    dim = _even_dim(scope, x)
    n, before = x.shape[dim], ":, " * dim
    half = n // 2
    from_end = dim == len(x.shape) - 1
    forms = listed(f"""
        [{before}:{half}] | [{before}{half}:] | [{before}::2] | .narrow({dim}, 0, {half}) | .chunk(2, {dim})[1] |
        .split({half}, {dim})[0] | .tensor_split(2, dim={dim})[1] | .index_select({dim}, torch.arange({half})) |
        .unflatten({dim}, (2, -1)).select({dim}, 1)
    """)
    if from_end:
        forms += [f"[..., -{half}:]", f"[..., :{half}]"]
    form = scope.choices.pick(forms)
    return scope.assign(f"{x.name}{form}", x, _with(x.shape, dim, half), is_contiguous=False)


@given_float(_splittable)
def halves(scope: Scope, x: Variable) -> bool:
    """Two parts at once."""
    dim = _even_dim(scope, x)
    half = x.shape[dim] // 2
    one, two = (scope.new(_with(x.shape, dim, half), dtype=x.dtype, is_contiguous=False) for _ in range(2))
    forms = [
        f"{x.name}.chunk(2, {dim})",
        f"torch.chunk({x.name}, 2, dim={dim})",
        f"{x.name}.split({half}, {dim})",
        f"torch.split({x.name}, [{half}, {half}], {dim})",
        f"torch.tensor_split({x.name}, 2, {dim})",
    ]
    if dim == 1:
        forms += [f"torch.hsplit({x.name}, 2)"]
    if dim == 2:
        forms += [f"torch.dsplit({x.name}, 2)"] if len(x.shape) >= 3 else []
    return scope.say(f"{one.name}, {two.name} = {scope.choices.pick(forms)}", target=one, more=(two,))


@given_float(lambda v: batch_first(v) and len(v.shape) >= 2 and any(1 < n <= 4 for n in v.shape[1:]))
def unbind(scope: Scope, x: Variable) -> bool:
    dim = scope.choices.pick([i for i, n in enumerate(x.shape) if i > 0 and 1 < n <= 4])
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    parts = tuple(scope.new(shape, dtype=x.dtype, is_contiguous=False) for _ in range(x.shape[dim]))
    names = ", ".join(part.name for part in parts)
    form = scope.choices.pick(["{x}.unbind({d})", "torch.unbind({x}, {d})", "({x}.select({d}, i) for i in range({n}))"])
    return scope.say(f"{names} = {form.format(x=x.name, d=dim, n=x.shape[dim])}", target=parts[0], more=parts[1:])


@given_float(lambda v: batch_first(v) and len(v.shape) >= 3)
def select(scope: Scope, x: Variable) -> bool:
    dim = scope.choices.between(1, len(x.shape) - 1)
    index = scope.choices.pick([0, -1])
    form = scope.choices.pick([f"[{':, ' * dim}{index}]", f".select({dim}, {index})"])
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return scope.assign(f"{x.name}{form}", x, shape, is_contiguous=False)


@given_float(lambda v: batch_first(v) and len(v.shape) >= 2)
def reshape(scope: Scope, x: Variable) -> bool:
    total = 1
    for n in x.shape[1:]:
        total *= n
    shapes: list[Shape] = [(total,)]
    shapes += [(2, total // 2), (total // 2, 2)] if total % 2 == 0 else []
    shapes += [(4, total // 4)] if total % 4 == 0 else []
    shapes += [(2, 2, total // 4), (total // 4, 2, 2)] if total % 4 == 0 and total >= 8 else []
    if total == 2 * 4 * 4:
        shapes.append((2, 4, 4))
    inner = scope.choices.pick(shapes)
    sizes, verb = ", ".join(map(str, inner)), "view" if x.is_contiguous and scope.choices.chance(50) else "reshape"
    batch = scope.choices.pick([f"{x.name}.shape[0]", "-1", f"{x.name}.size(0)", f"len({x.name})"])
    forms = [f"{x.name}.{verb}({batch}, {sizes})", f"torch.reshape({x.name}, ({batch}, {sizes}))"]
    if len(inner) == 1:
        forms += [f"{x.name}.flatten(1)", f"torch.flatten({x.name}, 1)"]
    if len(x.shape) == 2:
        forms += [f"{x.name}.unflatten(1, ({sizes},))"]
    return scope.assign(scope.choices.pick(forms), x, (BATCH, *inner))


@given_float(lambda v: len(v.shape) >= 2)
def transpose(scope: Scope, x: Variable) -> bool:
    rank = len(x.shape)
    first = scope.choices.pick([1, 0]) if rank > 2 and scope.choices.chance(15) else min(1, rank - 2)
    a, b = first, rank - 1
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    forms = [f".transpose({a}, {b})", f".permute({', '.join(map(str, order))})", f".swapaxes({a}, {b})"]
    if rank == 2:
        forms += [".T", ".t()"]
    if a == rank - 2:
        forms += [".mT", ".transpose(-1, -2)"]
    shape = tuple(x.shape[i] for i in order)
    return scope.assign(f"{x.name}{scope.choices.pick(forms)}", x, shape, is_contiguous=False)


@given_float()
def same_shape(scope: Scope, x: Variable) -> bool:
    """A view of the same shape."""
    forms = listed("""
        {x}[:] | {x}.view_as({x}) | {x}.unsqueeze(1).squeeze(1) | {x}[...] | {x}[None][0] | {x}.detach() |
        {x}.movedim(0, -1).movedim(-1, 0) | {x}.expand_as({x}) | {x}.data | torch.unsqueeze({x}, 0).squeeze(0) |
        {x}.real
    """)
    return scope.assign(scope.choices.pick(forms).format(x=x.name), x, is_contiguous=x.is_contiguous)


@given_float(lambda v: batch_first(v) and len(v.shape) == 2 and v.shape[1] <= 8)
def expand(scope: Scope, x: Variable) -> bool:
    forms = [
        "{x}.unsqueeze(1).expand(-1, 2, -1)",
        "{x}[:, None].expand({x}.shape[0], 2, {n})",
        "torch.broadcast_to({x}[:, None, :], ({x}.shape[0], 2, {n}))",
        "{x}[:, None].repeat(1, 2, 1)",
        "{x}.unsqueeze(1).repeat_interleave(2, 1)",
    ]
    form = scope.choices.pick(forms)
    return scope.assign(
        form.format(x=x.name, n=x.shape[1]), x, (BATCH, 2, x.shape[1]), is_overlapping="repeat" not in form
    )


@given_float(lambda v: batch_first(v) and v.shape[-1] % 2 == 0 and v.is_contiguous)
def complex_view(scope: Scope, x: Variable) -> bool:
    name = scope.new(()).name
    new = scope.new(x.shape, dtype=x.dtype)
    change = scope.choices.pick([f"{name}.mul_(2)", f"{name} = {name} * 2", f"{name}.add_(1j)"])
    return scope.say(
        f"{name} = torch.view_as_complex({x.name}.unflatten(-1, (-1, 2)))",
        change,
        f"{new.name} = torch.view_as_real({name}).flatten(-2)",
        target=new,
        stands_for=x,
    )


@given_float(lambda v: len(v.shape) == 3 and batch_first(v) and v.shape[1] == v.shape[2])
def diagonal(scope: Scope, x: Variable) -> bool:
    return scope.assign(f"{x.name}.diagonal(dim1=1, dim2=2)", x, x.shape[:2], is_contiguous=False)
