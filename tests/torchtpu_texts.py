"""The text of a graph on TorchTPU, and the results before and after it is rewritten."""

from collections.abc import Callable

from torch import Tensor

from tpufit import runtime


def compare(
    rewrite: Callable[[str], str], compute: Callable[..., Tensor], *values: Tensor
) -> tuple[Tensor, Tensor, str]:
    """Return the results of a computation by its graph's text, unchanged and rewritten; and the rewritten text."""
    from tpufit.drivers.torchtpu.compute_modes import computing, recording
    from tpufit.drivers.torchtpu.private_names import names
    from tpufit.drivers.torchtpu.programs import compile_text, text_of

    runtime.start(1, "test")
    with computing():
        there = [value.to("tpu") for value in values]
    with recording():
        given = [names().placeholder(list(value.shape), value.dtype, False) for value in values]
        result = compute(*given)
    text = text_of([result], given)
    new = rewrite(text)
    found = []
    for one in (text, new):
        with computing():
            run, _ = compile_text(one)
            found.append(run(there)[0].cpu())
    return found[0], found[1], new
