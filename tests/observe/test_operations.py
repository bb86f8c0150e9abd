"""Time of operations: each second once, and none for what is no operation."""

from time import sleep

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import record_function

from meshwright.observe.profile.measure import TimedOperation, most_expensive, overlap, time_operations
from meshwright.observe.profile.step_record import covered_s


def on_gpu() -> EventList:
    """As torch makes it of one product: the operation on the host, its kernel, and FSDP's name for the stretch."""
    operation = FunctionEvent(id=1, name="aten::mm", thread=1, start_us=0, end_us=10, device_type=DeviceType.CPU)
    operation.append_kernel("gemm", 0, 100)
    named = FunctionEvent(
        id=2, name="FSDP::pre_forward", thread=1, start_us=0, end_us=30, device_type=DeviceType.CPU,
        is_user_annotation=True,
    )  # fmt: skip
    kernel, stretch = (
        FunctionEvent(
            id=number, name=name, thread=7, start_us=20, end_us=120, device_type=DeviceType.CUDA,
            is_user_annotation=number == 4,
        )
        for number, name in ((3, "sm90_gemm"), (4, "FSDP::pre_forward"))
    )  # fmt: skip
    events = [operation, named, kernel, stretch]
    for event in events:
        event.use_device, event.stack = "cuda", []
    recorded = EventList(events, use_device="cuda")
    recorded._build_tree()  # type: ignore[no-untyped-call]
    return recorded


def test_a_second_of_a_gpu_is_listed_once() -> None:
    rows = on_gpu().key_averages()
    assert sum(row.self_device_time_total > 0 for row in rows) > 1
    assert most_expensive(rows, cuda=True) == (TimedOperation(name="aten::mm", calls=1, seconds=100e-6),)


def test_named_stretches_are_no_operations() -> None:
    def step() -> None:
        with record_function("FSDP::all_gather"):
            sleep(0.01)
            torch.ones(9) + 1

    timed, kernels = time_operations(step, torch.device("cpu"))
    names = [operation.name for operation in timed]
    assert "aten::add" in names and "aten::ones" in names and kernels is None
    assert not any("FSDP" in name for name in names) and sum(operation.seconds for operation in timed) < 0.01


def test_kernels_of_a_gpu_overlap() -> None:
    kernels = [("gemm", 0.0, 4.0), ("ncclDevKernel_AllGather", 3.0, 6.0), ("gemm", 7.0, 8.0)]
    overlapped = overlap(kernels)
    assert (overlapped.compute_s, overlapped.communication_s, overlapped.exposed_s, overlapped.idle_s) == (5, 3, 2, 1)
    assert covered_s([(0, 2), (1, 3), (5, 6)]) == pytest.approx(4)
