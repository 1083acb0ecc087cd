"""estimate.py --meshes: four techniques at once train as one process does, and what is predicted of
a rank is what real ones take and send."""

import json

import pytest
from conftest import cases, succeed
from test_estimate import estimate

from estimator import meshes
from estimator.live_bytes import LiveBytes
from estimator.meshes import Mesh

JOB = "--model gpt-6x4x64 --context 64 --batch-size 16 --optimizer adamw"
SMALL = "--model gpt-4x4x32 --context 16 --batch-size 8 --double --dropout 0"
MESHES = ["4,1,1,1", "1,4,1,1", "1,1,4,1", "1,1,1,4", "2,2,1,1", "2,1,2,1", "1,2,2,1", "1,2,1,2"]
COUNTED = [(mesh, "") for mesh in MESHES]
COUNTED += [(mesh, "--sequence-parallel") for mesh in ("1,4,1,1", "1,2,2,1")]
COUNTED += [("1,1,1,4", f"--attention {name}") for name in ("allgather", "ulysses")]
COUNTED += [("1,1,4,1", "--tie --clip-grad 1"), ("2,1,2,1", "--tie --clip-grad 1")]
MAIN = "2,2,2,1"
PARITY = {  # and its flags
    "2,2,2,1": "--optimizer adamw --clip-grad 0.1",
    "1,2,2,2": "--sequence-parallel",
    "2,1,2,2": "--tie --attention ulysses --clip-grad 0.1",
    "2,2,1,2": "--tie --sequence-parallel --attention allgather --clip-grad 0.1",
}


def words_of(mesh):
    return " ".join(meshes.rank_of(meshes.mesh_of(mesh), 0).command[1:])


def launch_ranks(n, flags, output):
    ranks = f"torchrun --standalone --nproc_per_node={n} tests/mesh_rank.py"
    succeed(f"{ranks} {flags} --output-dir {output}", forked=True)
    found = [json.loads(path.read_text()) for path in sorted(output.iterdir())]
    assert len(found) == n
    return found


@pytest.mark.parametrize("mesh", cases([(mesh,) for mesh in PARITY], lambda mesh: mesh == MAIN))
def test_eight_ranks_train_as_one_process(mesh, tmp_path):
    """To rounding, after three steps; and every weight is somewhere."""
    found = launch_ranks(8, f"--parity {words_of(mesh)} {SMALL} {PARITY[mesh]}", tmp_path)
    differences = {name: value for rank in found for name, value in rank.items()}
    assert len(differences) == 4 * 10 + 5 - ("--tie" in PARITY[mesh])
    assert max(value for rank in found for value in rank.values()) < 1e-11
    assert max(differences.values()) > 0, "these are not the same process"


def predict(mesh, flags, output):
    """By kind, of the stages that estimate.py looks at, and what the busiest of these sends."""
    found, mesh = [], meshes.mesh_of(mesh)
    for stage in meshes.stages_of(6, mesh.pp):
        rank = meshes.rank_of(mesh, stage)
        fakes = f"python tests/mesh_rank.py --on-fakes {rank.ranks} {rank.rank} {rank.steps}"
        words = " ".join(rank.command[1:])
        succeed(f"{fakes} {words} {flags} --output-dir {output / str(stage)}", forked=True)
        [path] = (output / str(stage)).iterdir()
        found.append(json.loads(path.read_text()))
    return found


def peak(rank):
    return sum(rank[kind] for kind in LiveBytes.KINDS)


@pytest.mark.parametrize("mesh, flags", cases(COUNTED, lambda *row: row == ("2,2,1,1", "")))
def test_what_is_predicted_is_what_ranks_take_and_send(mesh, flags, tmp_path):
    """Bytes at the peak of a step on the fullest rank, and those that the busiest one sends."""
    took = launch_ranks(4, f"{words_of(mesh)} {JOB} {flags}", tmp_path / "real")
    found = predict(mesh, f"{JOB} {flags}", tmp_path / "fake")
    assert max(map(peak, found)) == pytest.approx(max(map(peak, took)), rel=0.02)
    sent = [max(rank["sent"] for rank in ranks) for ranks in (found, took)]
    assert sent[0] == pytest.approx(sent[1], rel=0.02) and sent[0] > 0


@pytest.mark.full
def test_all_meshes_of_four_gpus():
    """Those that there can be, that fit, and in order."""
    job = "--model gpt-2x2x64 --context 64 --batch-size 4 --gpus 4 --memory 2 --meshes --fit"
    rows = json.loads(estimate(f"{job} --json").stdout)
    found = [tuple(row[name] for name in ("dp", "tp", "pp", "cp")) for row in rows]
    assert all(dp * tp * pp * cp == 4 for dp, tp, pp, cp in found)
    assert len(set(found)) == len(found) == 8  # of 10: four heads or layers there are not
    assert {max(tp, pp) for _, tp, pp, _ in found} == {1, 2}
    assert all(row["fits"] and row["peak"] == sum(row["kinds"].values()) for row in rows)
    sent = [row["sent"] for row in rows]
    assert sent == sorted(sent) and sent[0] > 0


@pytest.mark.full
def test_a_mesh_of_one_technique_is_that_technique():
    """FSDP, TP or both: the row of the script, of which a second step is predicted."""
    job = "--model gpt-4x4x64 --context 64 --batch-size 16 --gpus 4 --json"
    rows = json.loads(estimate(f"{job} --only FSDP,TP,FSDP_TP").stdout)
    scripts = {row["technique"]: row for row in rows}
    found = json.loads(estimate(f"{job} --meshes 4,1,1,1 1,4,1,1 2,2,1,1").stdout)
    for mesh, name in zip(found, ("FSDP", "TP", "FSDP_TP --tp 2"), strict=True):
        assert mesh["peak"] == pytest.approx(scripts[name]["peak"], rel=0.001), name
        assert mesh["sent"] == scripts[name]["sent"] > 0, name


def test_stages_that_may_be_the_fullest():
    assert meshes.stages_of(32, 1) == [0]
    assert meshes.stages_of(32, 2) == [0, 1]
    assert meshes.stages_of(32, 8) == [0, 1, 7]
    assert meshes.stages_of(9, 4) == [0, 1, 3]  # 2, 2, 2 and 3 blocks
    assert meshes.stages_of(11, 4) == [0, 1, 3]  # 2, 3, 3 and 3
    assert meshes.stages_of(10, 8) == [0, 1, 3, 7]  # the fourth is the first of two
    assert len(meshes.meshes_of(8)) == 20 and len(meshes.meshes_of(6)) == 16
    assert meshes.meshes_of(2)[0] == Mesh(2, 1, 1, 1)
