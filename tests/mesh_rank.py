"""Run estimator/mesh_step.py among real ranks, on real tensors: count, or compare with one process.

    torchrun --standalone --nproc_per_node=4 tests/mesh_rank.py --pp 2 --tp 2 --model ...
    torchrun --standalone --nproc_per_node=8 tests/mesh_rank.py --parity --dp 2 --tp 2 --pp 2 ...
    python tests/mesh_rank.py --on-fakes 4 0 1 --pp 2 --tp 2 --model ...

The last one does the same as rank 0 of 4, in 1 step, on tensors without numbers. The bytes at the
peak of the second step, by kind, and those sent in it, go into rank0.json, rank1.json, ... in
--output-dir; with --parity, by how much the weights differ after the third step from those of a
process that has the model and the batches to itself: for each tensor the largest difference,
relative to its largest value.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from estimator import trial  # noqa: E402


def tokens_of(step, batch_size, context, classes):
    """Of all ranks together, and the next ones."""
    source = torch.Generator().manual_seed(step)
    tokens = torch.randint(classes, (batch_size, context + 1), generator=source)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Loader(trial.Loader):
    def __init__(self, args, job, batch_size, sampler, **_):
        super().__init__(args, job, batch_size)
        self.share = sampler.rank


class RealRun(trial.ShortRun):
    def batches(self, loader, epoch):
        args = self.args
        while self.step < self.total_steps:
            self.step += 1
            texts = tokens_of(self.step, args.batch_size, args.context, len(loader.job.classes))
            yield tuple(t.split(loader.batch_size)[loader.share] for t in texts)
        raise trial.Finished

    def load_sharded_snapshot(self, model, optimizer, scheduler):
        super().load_snapshot(model, optimizer)
        RealRun.model, RealRun.job_args = model, self.args


def train_alone(args, classes):
    import common

    torch.manual_seed(args.seed)
    model = common.make_model(args, classes, channels_last=False)
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, trial.STEPS)
    for step in range(1, 4):
        tokens, labels = tokens_of(step, args.batch_size, args.context, len(classes))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        if args.clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        scheduler.step()
    return model


def compare(words):
    trial.ShortRun, trial.Loader = RealRun, Loader
    trial.run_script(words, None, steps=3, as_on_a_gpu=False)
    args, ours = RealRun.job_args, RealRun.model
    alone = train_alone(args, [chr(33 + i) for i in range(65)])
    expected, differences = dict(alone.named_parameters()), {}
    for name, parameter in ours.named_parameters():
        found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        theirs = expected.pop(name)
        differences[name] = ((found - theirs).abs().max() / theirs.abs().max()).item()
    return differences


def main():
    words, ranks, rank, steps = sys.argv[1:], None, 0, trial.STEPS
    folder = Path(words[words.index("--output-dir") + 1])
    if words[0] == "--on-fakes":
        ranks, rank, steps = map(int, words[1:4])
        words = words[4:]
    if words[0] == "--parity":
        found = compare(["estimator/mesh_step.py", *words[1:]])
    else:
        options = {"block": 1, "as_on_a_gpu": False, "rank": rank, "steps": steps}
        live, _ = trial.run_script(["estimator/mesh_step.py", *words], ranks, **options)
        found = live.peak() | {"sent": sum(message.sent for message in live.messages)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the others are not waited for


if __name__ == "__main__":
    main()
