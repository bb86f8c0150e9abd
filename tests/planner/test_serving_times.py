"""Times of serving: what must follow from what, whatever the constants; and the rules of schedulers by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshwright.planner.cost import speeds
from meshwright.planner.serving.cached_layers import served
from meshwright.planner.serving.closed_loop import Load, serve
from meshwright.planner.serving.deployment import MESHWRIGHT, SGLANG, VLLM, Deployment, EngineDegrees, Framework
from meshwright.planner.serving.step_times import StepTimes
from meshwright.spec import presets
from meshwright.spec.plan.execution import FLASH_4_GAIN
from meshwright.spec.plan.execution import HOPPER as HOPPER_RATES
from tests.planner.test_serving_memory import deployment

PLAIN = Load(input_tokens=100, output_tokens=10, concurrency=4)


class FixedTimes(StepTimes):
    """A step of prompts takes a millisecond per token, one of decoding 2 ms."""

    def __init__(self, framework: Framework) -> None:
        bare = framework._replace(prefill_us=0.0, turn_us=0.0, ahead=False)
        super().__init__(replace(deployment("llama-3.1-8b"), framework=bare))

    def prefill_s(self, chunks: Sequence[tuple[float, float]], batch: float = 0.0, context: float = 0.0) -> float:
        return sum(new for new, _ in chunks) / 1e3

    def decode_s(self, batch: float, context: float) -> float:
        return 2e-3


def test_one_request_waits_for_its_prompt_and_its_tokens() -> None:
    outcome = serve(FixedTimes(VLLM), replace(PLAIN, concurrency=1))
    assert outcome.first_token_s == pytest.approx(0.1)
    assert outcome.per_token_s == pytest.approx(2e-3)
    assert outcome.request_s == pytest.approx(0.1 + 9 * 2e-3)
    assert outcome.output_tokens_per_s == pytest.approx(10 / outcome.request_s)


def test_requests_of_one_length_stay_in_step_where_their_prompts_fit_into_one() -> None:
    outcome = serve(FixedTimes(SGLANG), PLAIN)
    assert outcome.first_token_s == pytest.approx(0.4)
    assert outcome.per_token_s == pytest.approx(2e-3)


def test_prompts_that_come_one_by_one_hold_up_who_decodes() -> None:
    times = FixedTimes(VLLM._replace(budget=104))
    outcome = serve(times, PLAIN)
    assert 0.1 <= outcome.first_token_s < 0.4
    assert outcome.per_token_s > 0.02  # nine tokens, and the prompts of three others between them


def test_without_room_requests_wait() -> None:
    times = FixedTimes(SGLANG)
    free, tight = serve(times, PLAIN), serve(times, PLAIN, room=110.0)
    assert tight.first_token_s > free.first_token_s
    assert tight.output_tokens_per_s < free.output_tokens_per_s


def test_looking_for_requests_seldom_makes_them_wait() -> None:
    load = replace(PLAIN, spread=0.2, output_tokens=50)
    often, seldom = FixedTimes(SGLANG), FixedTimes(SGLANG._replace(receive_every=10))
    assert serve(seldom, load).first_token_s > serve(often, load).first_token_s


@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
def test_more_in_flight_gives_more_tokens_later(framework: str) -> None:
    from meshwright.planner.serving.deployment import FRAMEWORKS

    times = StepTimes(replace(deployment("llama-3.1-8b"), framework=FRAMEWORKS[framework]))
    outcomes = [serve(times, Load(input_tokens=512, output_tokens=128, concurrency=c, spread=0.2)) for c in (1, 8, 64)]
    assert outcomes[0].output_tokens_per_s < outcomes[1].output_tokens_per_s < outcomes[2].output_tokens_per_s
    assert outcomes[0].per_token_s < outcomes[1].per_token_s < outcomes[2].per_token_s
    assert outcomes[0].first_token_s < outcomes[1].first_token_s < outcomes[2].first_token_s


def test_longer_prompts_contexts_and_batches_take_longer() -> None:
    times = StepTimes(deployment("qwen3-32b", "fp8", tp=2))
    assert times.prefill_s([(512, 0)]) < times.prefill_s([(2048, 0)]) < times.prefill_s([(8192, 0)])
    assert times.prefill_s([(2048, 0)]) < times.prefill_s([(2048, 8192)])
    assert times.decode_s(1, 1024) < times.decode_s(64, 1024) < times.decode_s(64, 16384)
    assert times.decode_s(64, 1000) == pytest.approx(times.decode_s(64, 1001), rel=1e-2)


def test_decoding_alone_reads_every_weight_once() -> None:
    """No step is sooner than its bytes allow: 16.06 GB of an 8B model at 3.35 TB/s are 4.79 ms; and twice that is
    more than kernels, launches and the host take."""
    times = StepTimes(deployment("llama-3.1-8b"))
    assert 4.79e-3 < times.decode_s(1, 512) < 2 * 4.79e-3


def test_narrower_weights_and_more_ranks_decode_sooner() -> None:
    def seconds(engine: Deployment) -> float:
        return StepTimes(engine).decode_s(4, 1024)

    assert seconds(deployment("qwen3-32b", "fp8")) < seconds(deployment("qwen3-32b"))
    assert seconds(deployment("qwen3-32b", tp=4)) < seconds(deployment("qwen3-32b", tp=2))
    assert seconds(deployment("llama-3.1-8b", device="b200")) < seconds(deployment("llama-3.1-8b"))


def test_drafts_make_a_step_longer_and_a_token_sooner() -> None:
    plain = deployment("deepseek-v3", "fp8", "h200", tp=8, expert_ep=8)
    drafted = replace(plain, drafted=3)
    assert StepTimes(plain).decode_s(4, 1024) < StepTimes(drafted).decode_s(4, 1024)
    load = Load(input_tokens=512, output_tokens=128, concurrency=4)
    assert serve(StepTimes(drafted), load, accepted=2.4).per_token_s < serve(StepTimes(plain), load).per_token_s


def test_experts_that_are_spread_over_more_ranks_are_sooner() -> None:
    degrees = EngineDegrees(attention_dp=8, expert_ep=8)
    wide = replace(deployment("deepseek-v3", "fp8", "h200", tp=8, expert_ep=8), degrees=degrees)
    assert StepTimes(wide).decode_s(32, 1024) > 0
    assert StepTimes(wide).decode_s(8, 1024) < StepTimes(wide).decode_s(128, 1024)


def test_prompts_of_this_engine_take_the_kernel_that_attends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-4 where it is installed. Other frameworks, and other devices, keep published rates."""

    def chunk_s(framework: Framework = MESHWRIGHT, device: str = "h200", head_dim: int = 128) -> float:
        engine = deployment("llama-3.1-8b", device=device)
        model = served(replace(engine.model.shape, head_dim=head_dim))
        return StepTimes(replace(engine, framework=framework, model=model)).chunk_s(8192.0, 8192.0)

    def chunks_s() -> list[float]:
        return [chunk_s(), chunk_s(VLLM), chunk_s(device="a100"), chunk_s(head_dim=256)]

    before = chunks_s()
    rate, peak = HOPPER_RATES["flash"], presets.device("h200").half_flop_per_s
    pairs = (16384.0**2 - 8192.0**2) / 2 + rate.half * 8192.0 / 2
    assert before[0] == pytest.approx(32 * 4 * 32 * 128 * pairs / (peak * rate.forward), rel=1e-3)
    monkeypatch.setattr(speeds, "has_flash_4", lambda: True)
    after = chunks_s()
    assert before[0] / after[0] == pytest.approx(FLASH_4_GAIN, rel=1e-3)
    assert after[1:] == before[1:], "heads of 256 are too wide for it"
