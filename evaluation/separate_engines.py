"""Load of published deployments whose engines for prompts and for decoding are separate.

The rates of both decide how the requests in flight split. `meshwright plan --serve` plans no such deployment.
"""

from meshwright.planner.serving.cached_layers import sequence_bytes
from meshwright.planner.serving.closed_loop import Load, Served
from meshwright.planner.serving.step_times import StepTimes

ROUNDS = 30
HANDED_S = 0.05
"""Time from the end of a prompt on one engine to the first step on the other, without the bytes of its cache.
It covers two routers and two queues.
"""


def serve_apart(
    prompts: StepTimes, decoding: StepTimes, load: Load, workers: tuple[int, int], accepted: float = 1.0
) -> Served:
    """Return the mean values of a load on separate engines.

    Prompts wait as at one server with steps of one length (M/D/1), and at the start of the load as long as half of it
    takes to read. If prompts are the bottleneck, the other requests wait for them.

    Args:
        load: `concurrency` is that of an attention rank that decodes.
        workers: Engines that read prompts, and engines that decode.
    """
    length, output = load.input_tokens * (1 - load.spread / 2), load.output_tokens * (1 - load.spread / 2)
    readers = workers[0] * prompts.deployment.degrees.attention_dp
    places = workers[1] * decoding.deployment.degrees.attention_dp
    in_flight = load.concurrency * places
    read_s = prompts.prefill_s([(length, 0.0)])
    batch = max(1.0, load.concurrency)
    handed_s = HANDED_S + _moved_s(prompts, length)
    first_s = token_s = 0.0
    for _ in range(ROUNDS):
        token_s = decoding.decode_s(batch, length + output / 2) / accepted
        whole = in_flight / (read_s + handed_s + output * token_s)
        rate = min(whole, readers / read_s)
        busy = min(0.95, rate * read_s / readers)
        waits_s = read_s * busy / (2 * (1 - busy)) + in_flight / readers * read_s / 2 / load.waves
        narrow_s = max(0.0, in_flight / rate - read_s - handed_s - output * token_s)
        first_s = read_s + handed_s + max(waits_s, narrow_s)
        left = min(load.concurrency, rate * output * token_s / places)
        batch = max(1.0, (batch + left) / 2)
    request_s = first_s + token_s * output
    return Served(
        first_token_s=first_s + prompts.deployment.framework.prefill_us / 1e6, per_token_s=token_s, request_s=request_s,
        output_tokens_per_s=in_flight * output / request_s / places,
    )  # fmt: skip


def _moved_s(prompts: StepTimes, length: float) -> float:
    sender = prompts.deployment
    network = sender.device.network_bytes_per_s or 1e10
    return sequence_bytes(sender.model, length, sender.cache_width, sender.degrees.tp) / network
