"""`compress plan`: its counts against arrays that exist, its verdict, and that nothing is run or written."""

import json

import jax
import jax.numpy as jnp
import pytest

from compress import cli, machine, plan
from compress.distill.student import make_student, student_architecture
from compress.models import read_config
from compress.models.decoder import hidden_states, linears, logits, stack
from compress.models.folder import load
from compress.quantize.quantizers import QUANTIZERS
from export.quantized import QuantSpec
from tests import tiny_run

STAGES = ["distill", "align", "quantize", "export", "eval"]


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "mesh_of_devices", lambda shape: None)
        patch.setattr(jax, "device_count", lambda: 1)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tiny_run.write_world(folder)
    return folder


def run_plan(world, capsys, *flags):
    code = cli.main(["plan", str(world / "recipe.toml"), "--out", str(world / "run"), "--json", *flags])
    shown = capsys.readouterr()
    return code, json.loads(shown.out or pytest.fail(shown.err))


def test_a_recipe_that_fits_is_planned_and_nothing_is_written(world, capsys):
    before = sorted(world.rglob("*"))
    code, found = run_plan(world, capsys)
    assert code == 0
    assert found["fits"]
    assert list(found["stages"]) == STAGES
    assert sorted(world.rglob("*")) == before
    assert all(row["memory_gb"] > 0 for row in found["stages"].values())
    assert found["stages"]["distill"]["seconds"] >= 0


def test_memory_that_does_not_suffice_is_told_with_the_batch_that_would_fit(world, capsys, monkeypatch):
    def distill(self, settings):
        return plan.Need(device=10**9 * (settings.per_device_batch or 8), host=0, disk=0, flops=0.0)

    monkeypatch.setattr(plan.Plan, "distill", distill)
    for other in STAGES[1:]:
        monkeypatch.setattr(plan.Plan, other, lambda self, settings: plan.Need(0, 0, 0, 0.0))
    monkeypatch.setattr(plan, "resident_bytes", lambda: 0)
    monkeypatch.setattr(plan, "free_memory", lambda: 3 * 10**9)
    code, found = run_plan(world, capsys)
    assert code == plan.MISFIT == 1
    assert not found["fits"]
    assert found["change"] == {"distill": "per_device_batch = 2 takes 2 GB, and the result is the same"}
    monkeypatch.setattr(plan, "free_memory", lambda: 900_000_000)
    assert "not even per_device_batch = 1 fits" in run_plan(world, capsys)[1]["change"]["distill"]


def test_what_alignment_holds_depends_on_remat(world, capsys, monkeypatch):
    for other in set(STAGES) - {"align"}:
        monkeypatch.setattr(plan.Plan, other, lambda self, settings: plan.Need(0, 0, 0, 0.0))
    monkeypatch.setattr(plan, "resident_bytes", lambda: 0)
    long = ("--set", "align.sequence_length=512")
    again, kept = (
        run_plan(world, capsys, *long, "--set", f"align.remat={remat}")[1]["stages"]["align"]
        for remat in ("true", "false")
    )
    assert again["memory_gb"] < kept["memory_gb"]


def test_a_full_disk_is_told(world, capsys, monkeypatch):
    for name in STAGES:
        monkeypatch.setattr(plan.Plan, name, lambda self, settings: plan.Need(0, 0, 2 * 10**9, 0.0))
    usage = machine.shutil.disk_usage(world)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=7 * 10**9))
    code, found = run_plan(world, capsys)
    assert code == 1
    assert found["change"] == {"disk": "free 3 GB, or give --out a place on another disk"}


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--set", "quantize.group_size=256"], 2, "group_size = 256 does not divide"),
        (["--set", "distill.student=layers:9"], 2, "the teacher has 4 layers"),
        (["--set", "eval.data=none.jsonl"], 4, "none.jsonl: no such file"),
    ],
)
def test_what_a_run_would_refuse_is_refused(world, capsys, flags, code, says):
    assert cli.main(["plan", str(world / "recipe.toml"), *flags]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "bits", "symmetric"), [("rtn", 4, True), ("rtn", 8, False), ("nf4", 4, True)], ids=str
)
def test_the_shapes_of_a_packed_model_have_the_bytes_of_one(method, bits, symmetric):
    hf = tiny_run.CONFIG | {"num_hidden_layers": 1, "intermediate_size": 64}
    config = read_config(hf)
    spec = QuantSpec(bits=bits, group_size=32, symmetric=symmetric)
    weights = {name: jnp.asarray(value) for name, value in tiny_run.weights(hf).items()}
    real = weights | {name: QUANTIZERS[method].quantize(weights[name], spec) for name in linears(config)}
    found = plan._packed(config, dict.fromkeys(linears(config), spec), jnp.float32, method)
    alike = lambda a, b: a.shape == b.shape and a.dtype == b.dtype  # noqa: E731
    assert jax.tree.all(jax.tree.map(alike, found, real))
    assert plan.size(found) == sum(leaf.nbytes for leaf in jax.tree.leaves(real))
    assert jax.tree.all(jax.tree.map(alike, plan._stacked(config, found), stack(config, real)))


def test_what_a_program_holds_is_its_arguments_results_and_what_is_between():
    n = 1 << 10
    square = plan.shape_of((n, n), jnp.float32)
    # The first product has to be there while the second one is made: two arguments, one between, one result.
    held = plan.held(jax.jit(lambda a, b: (a @ b) @ a), square, square)
    assert 4 * 4 * n * n <= held <= 4.1 * 4 * n * n


def test_the_operations_of_a_forward_pass_are_those_that_xla_counts():
    hf = tiny_run.CONFIG | {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 4096}
    config = read_config(hf)
    weights = plan._floats(config, jnp.float32)
    tokens = plan.shape_of((1, 32), jnp.int32)

    def run(stacked, tokens):
        return logits(config, stacked, hidden_states(config, stacked, tokens))

    counted = jax.jit(run).lower(plan._stacked(config, weights), tokens).compile().cost_analysis()["flops"]
    assert plan.forward_flops(config, 32) * 32 == pytest.approx(counted, rel=0.1)


def test_rounding_shrinks_what_is_written_and_adapters_what_is_held(world, capsys):
    flags = "--set distill.group_size=32 --set distill.landing=fake_quantize"
    plain, rounded, adapted = (
        run_plan(world, capsys, *more.split())[1]["stages"]["distill"]
        for more in ("", flags, f"{flags} --set distill.rank=2")
    )
    assert plain["disk_gb"] > rounded["disk_gb"] > adapted["disk_gb"] > 0
    assert adapted["memory_gb"] > 0


@pytest.mark.parametrize("student", ["half", "layers:3", "layers:0,2,3"])
def test_the_student_has_the_depth_of_its_cut(world, student):
    teacher = load(world / "teacher")
    assert student_architecture(student, teacher.config) == make_student(student, teacher, seed=0).config


def test_free_memory_is_that_of_the_control_group_where_it_is_less(tmp_path, monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 8 kB\nMemAvailable: 4 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}
    files["/sys/fs/cgroup/memory.current"] = "1024\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda self: files[str(self)])
    assert machine.free_memory() == 4096
    files["/sys/fs/cgroup/memory.max"] = "3072\n"
    assert machine.free_memory() == 2048


def test_a_table_and_no_force(world, capsys):
    assert cli.main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--force" not in shown
    assert "Exits 0 if it fits" in " ".join(shown.split())
