"""Other ways to write the loop of pytorch_SingleGPU.py, which benchmark.py compares with it.

    python measure/peers.py --loop pytorch_train --dataset synthetic --max-steps 24

minimal        only forward, backward and step, on batches that are on the device: the upper limit
pytorch_train  as in the page that this repository began from: PIL images, transformed one by one in
               loader processes, and two .item() per step

For libraries there are scripts: docs/ecosystem.md.

Model, optimizer, batch and images are the script's, in fp32 or by --dtype. So are clock and memory
(harness/clock.py): on a GPU no step is waited for, unless the loop itself does so. The images are
in CPU memory here, even where a script keeps them on the GPU.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
from harness.clock import StepClock  # noqa: E402
from harness.progress import RunState  # noqa: E402
from harness.result import describe, gather_figures  # noqa: E402
from jobs import images as image_job  # noqa: E402


class Pictures(Dataset):
    """What torchvision's datasets hand out: a PIL image, transformed one by one."""

    def __init__(self, images, side):
        self.images = images.images
        self.labels = images.labels
        self.transform = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.RandomCrop(self.images.shape[-1], padding=4),
                transforms.RandomHorizontalFlip(),
                *([transforms.Resize(side)] if side != self.images.shape[-1] else []),
                transforms.ToTensor(),
                transforms.Normalize(image_job.MEAN, image_job.STD),
            ]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def main():
    parser = common.argument_parser(__doc__)
    parser.add_argument("--loop", choices=["minimal", "pytorch_train"], required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = common.parse_args(parser)
    common.prepare_process(args)
    device = common.get_device(args)
    common.seed_everything(args.seed, args.deterministic)
    train_set, _ = common.make_datasets(args)
    model = common.make_model(args, train_set.classes).to(device).train()
    optimizer = common.make_optimizer(args, model)
    batch = train_set.__getitems__(list(range(args.batch_size)))
    loader = itertools.repeat(train_set.prepare(batch, device, args.seed, 0, 0))
    if args.loop != "minimal":
        loader = DataLoader(
            Pictures(train_set, args.image_size), args.batch_size, shuffle=True, drop_last=True,
            num_workers=2 if args.workers is None else args.workers, persistent_workers=True,
            pin_memory=device.type == "cuda",
        )  # fmt: skip

    def step(images, labels):
        if args.loop == "pytorch_train":
            images = images.to(device)
            labels = labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype != "float32"):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        if args.loop == "pytorch_train":  # its running loss and accuracy
            return loss.item(), (logits.argmax(1) == labels).sum().item()

    clock = StepClock([device])
    state = RunState(torch.zeros(()))
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    clock.start()
    for images, labels in itertools.islice(batches, args.max_steps):
        step(images, labels)
        clock.tick()
        state.step += 1
    clock.read()
    result = describe(args, train_set, state, clock, model)
    result |= gather_figures(clock, model, optimizer, {}) | {"technique": f"peer: {args.loop}"}
    result |= {"state_bytes": None, "eval_loss": [None], "eval_accuracy": [None]}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{args.loop}: median {result[result['rate']]:,.1f} {train_set.units}/s")


if __name__ == "__main__":
    main()
