"""What the tables of the Learn pages ask the planner: a model, a cluster, what stays, what changes from row to row."""

from dataclasses import dataclass

from meshwright.spec.layout.schedule import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One `meshwright plan` a row."""

    model: str
    cluster: str
    layout: str
    """Of every row, `{}` where the row's word goes."""
    recipe: str = ""
    """The same for --recipe; empty = the planner's."""
    head: str
    rows: dict[str, str]
    """Label -> what `{}` stands for in it."""
    columns: tuple[str, ...]

    def words(self, row: str) -> tuple[str, ...]:
        """Arguments of the command of one row."""
        return (*self._command(row).split()[1:], "--json")

    @property
    def command(self) -> str:
        """The first row's command, as the page shows it."""
        return self._command(next(iter(self.rows.values())))

    def _command(self, row: str) -> str:
        recipe = f" --recipe {self.recipe.replace('{}', row)}" if self.recipe else ""
        layout = self.layout.replace("{}", row)
        return f"meshwright plan {self.model.replace('{}', row)} --cluster {self.cluster}{recipe} --layout {layout}"


FOUR_NODES = "h100x8 --nodes 4"
PLAIN = "micro_batch=1,recompute=none"

TABLES = {
    "models": Table(
        model="{}",
        cluster="h100x1 --nodes 1",
        layout=PLAIN,
        head="model",
        rows={f"`{name}`": name for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b")},
        columns=(
            "parameters, GiB",
            "gradients, GiB",
            "optimizer, GiB",
            "states, GiB",
            "activations, GiB",
            "fits 80 GB",
        ),
    ),
    "zero": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout=f"dp_shard=32,zero={{}},{PLAIN}",
        head="`zero`",
        rows={"0, no ZeRO": "0", "1, ZeRO-1": "1", "2, ZeRO-2": "2", "3, ZeRO-3": "3"},
        columns=(
            "parameters, GiB",
            "gradients, GiB",
            "optimizer, GiB",
            "activations, GiB",
            "peak, GiB",
            "fits 80 GB",
            "sent, GB",
            "step, s",
        ),
    ),
    "sequence": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout=f"dp_shard=32,zero=3,{PLAIN}",
        recipe="sequence={}",
        head="`recipe.sequence`",
        rows={f"{2**power:,}": str(2**power) for power in range(11, 16)},
        columns=("states, GiB", "activations, GiB", "peak, GiB", "fits 80 GB", "step, s"),
    ),
    "recompute": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout="dp_shard=32,zero=3,micro_batch=1,recompute={}",
        head="`layout.recompute`",
        rows={f"`{name}`": name for name in ("none", "norms", "selective", "all-but-attention", "full")},
        columns=("activations, GiB", "peak, GiB", "step, s"),
    ),
    "recompute_plain": Table(
        model="gpt3-175b",
        cluster="h100x8 --nodes 8",
        layout="tp=8,sp=true,pp=8,schedule=1f1b,micro_batch=1,kernels=reference,recompute={}",
        recipe="sequence=2048",
        head="`layout.recompute`, plain attention",
        rows={f"`{name}`": name for name in ("none", "selective", "full")},
        columns=("activations, GiB", "peak, GiB", "step, s"),
    ),
    **{
        f"plain_{size}": Table(
            model=f"llama-3.1-{size}",
            cluster=cluster,
            layout=f"{degrees},kernels=reference,{{}}",
            head="sequence, `layout.recompute`, plain attention",
            rows={
                f"{sequence:,} `{policy}`": f"recompute={policy} --recipe sequence={sequence}"
                for sequence in (2048, 8192)
                for policy in ("none", "selective", "full")
            },
            columns=("states, GiB", "activations, GiB", "peak, GiB", "fits 80 GB"),
        )
        for size, cluster, degrees in (
            ("8b", FOUR_NODES, "dp_shard=32,zero=3,micro_batch=1"),
            ("70b", "h100x8 --nodes 8", "tp=8,sp=true,dp_shard=8,zero=3,micro_batch=1"),
        )
    },
    "llama3": Table(
        model="llama-3.1-405b",
        cluster="h100x8",
        layout="tp=8,sp=true,pp=16,vp=4,schedule=interleaved,zero=1,recompute=none,micro_batch=1,{}",
        head="GPUs, published MFU",
        rows={
            "8,192, sequence 8,192: 43 %": "cp=1 --nodes 1024 --recipe sequence=8192,global_batch=2048",
            "16,384, sequence 8,192: 41 %": "cp=1 --nodes 2048 --recipe sequence=8192,global_batch=2048",
            "16,384, sequence 131,072: 38 %": "cp=16 --nodes 2048 --recipe sequence=131072,global_batch=128",
        },
        columns=("MFU (full)", "step, s", "peak, GiB", "fits 80 GB"),
    ),
    "recompute_layers": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout="dp_shard=32,zero=3,micro_batch=1,recompute=full,recompute_layers={}",
        head="`layout.recompute_layers`",
        rows={"8": "8", "16": "16", "24": "24", "0: all 32": "0"},
        columns=("activations, GiB", "peak, GiB", "step, s"),
    ),
    "offload": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        recipe="sequence=32768",
        layout=f"dp_shard=32,zero=3,{PLAIN},offload={{}}",
        head="`layout.offload`, 32,768 tokens",
        rows={"`off`": "off", "`activations`": "activations"},
        columns=("activations, GiB", "in host memory, GiB", "of a node, GiB", "peak, GiB", "fits 80 GB", "step, s"),
    ),
    "micro_batch": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout="dp_shard=32,zero=3,micro_batch={},recompute=none",
        head="`layout.micro_batch`",
        rows={"1": "1", "2": "2", "4": "4"},
        columns=("activations, GiB", "peak, GiB", "fits 80 GB", "step, s"),
    ),
    "tensor": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout=f"{{}},zero=3,{PLAIN}",
        head="layout",
        rows={
            "`tp=1`": "tp=1,dp_shard=32",
            "`tp=2 sp=false`": "tp=2,sp=false,dp_shard=16",
            "`tp=2 sp=true`": "tp=2,sp=true,dp_shard=16",
            "`tp=4 sp=true`": "tp=4,sp=true,dp_shard=8",
            "`tp=8 sp=true`": "tp=8,sp=true,dp_shard=4",
            "`tp=16 sp=true`, across two nodes": "tp=16,sp=true,dp_shard=2",
        },
        columns=("activations, GiB", "peak, GiB", "sent by tp, GB", "step, s", "MFU (full)"),
    ),
    "context": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout=f"{{}},zero=3,{PLAIN}",
        recipe="sequence=65536,global_batch=64,document_mask=false",
        head="layout",
        rows={f"`cp={cp}`": f"cp={cp},dp_shard={32 // cp}" for cp in (1, 2, 4, 8, 16)},
        columns=("activations, GiB", "peak, GiB", "fits 80 GB", "sent by cp, GB", "step, s"),
    ),
    "pipeline": Table(
        model="llama-3.1-8b",
        cluster=FOUR_NODES,
        layout=f"pp=4,dp_shard=8,zero=1,{PLAIN},{{}}",
        head="`layout.schedule`",
        rows={
            f"`{name}`" + ", `vp=2`" * (kind.deeper and kind.stages > 1): f"schedule={name}"
            + f",vp={kind.stages}" * (kind.stages > 1)
            for name, kind in KINDS.items()
        },
        columns=("bubble", "activations, GiB", "peak, GiB", "sent by pp, GB", "step, s"),
    ),
    "experts": Table(
        model="mixtral-8x7b",
        cluster="h100x8 --nodes 8",
        layout="dp_shard=64,zero=3,micro_batch=1,recompute=all-but-attention,ep={}",
        head="`layout.ep`",
        rows={"1": "1", "2": "2", "4": "4", "8": "8"},
        columns=("states, GiB", "peak, GiB", "sent by ep, GB", "sent, GB", "step, s"),
    ),
    "optimizer_states": Table(
        model="llama-3.1-8b",
        cluster="h100x1 --nodes 1",
        recipe="{}",
        layout="micro_batch=1,recompute=full",
        head="`optimizer_states`, `master_weights`",
        rows={
            f"`{states}`, `{masters}`": f"optimizer_states={states},master_weights={masters}"
            for states, masters in (
                ("fp32", "fp32"),
                ("bf16", "fp32"),
                ("int8", "fp32"),
                ("bf16", "none"),
                ("int8", "none"),
            )
        },
        columns=("states, GiB", "peak, GiB", "fits 80 GB"),
    ),
    "muon": Table(
        model="llama-3.1-8b",
        cluster="h100x8 --nodes 1",
        recipe="optimizer={}",
        layout=f"dp_shard=8,zero=3,{PLAIN}",
        head="`optimizer`",
        rows={"`adamw`": "adamw", "`muon`": "muon"},
        columns=("moments, GiB", "update, ms", "Muon's products and exchange, ms", "step, s"),
    ),
}
