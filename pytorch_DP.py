"""Train on all GPUs of a machine from one process with DataParallel, the predecessor of DDP.

Differs     from pytorch_SingleGPU.py: at every step the weights are copied to all GPUs, the batch
            is scattered, a thread per GPU computes, and the first gathers results and gradients.
            Lines tagged "# DP:".
Command:    python pytorch_DP.py
            CUDA_VISIBLE_DEVICES=0,1 python pytorch_DP.py --dtype bfloat16
Use it      to understand old code. For new code use DDP: in one process Python's global lock slows
            the threads down, and the first GPU needs more time and memory than the others.
Holds       on the first GPU 4 bytes per parameter, 4 for its gradient, and 4 (SGD with momentum) or
            8 (AdamW) for the optimizer; during a step, on each GPU a replica and its gradients,
            8 per parameter, and the activations of its part of the batch.
Sends       per step, to and from each other GPU, 4 bytes per parameter each way, and the inputs.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler

import common


class Replica(nn.Module):
    """DP: copied to each GPU. It enables autocast itself, because autocast is thread-local:
    DataParallel tells its threads whether autocast is enabled, but not its dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        autocast = self.dtype != torch.float32
        with torch.autocast(inputs.device.type, self.dtype if autocast else None, enabled=autocast):
            logits = self.model(inputs)
        return logits.to(torch.get_default_dtype())  # DP: the softmax needs fp32 precision


def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32",
        help="dtype of autocast (default: float32, without autocast)",
    )  # fmt: skip
    args = common.parse_args(parser)
    common.prepare_process(args)
    device = common.get_device(args)
    common.announce(args, device)
    common.seed_everything(args.seed, args.deterministic)
    dtype = common.get_dtype(args, device)

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    train_loader = common.make_loader(args, train_set, args.batch_size, sampler, drop_last=True)
    eval_loader = common.make_loader(args, eval_set, args.batch_size)

    # 3. Model
    model = common.make_model(args, train_set.classes).to(device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    parallel = replica = Replica(model, dtype)
    if gpus:  # DP: DataParallel needs GPUs
        parallel = nn.DataParallel(replica, device_ids=list(range(gpus)))
    common.print0(f"DataParallel: {gpus} GPUs{', so it does nothing' if gpus < 2 else ''}")

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # DP: for float16
    run = common.Run(args, device, train_loader, gpus)  # DP: counts the memory of all GPUs
    run.resume_or_exit(model, optimizer, scheduler, scaler=scaler)

    # 5. Train
    for epoch in run.epochs_left():
        generator.manual_seed(args.seed + epoch)  # a new order every epoch
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = parallel(inputs)  # DP: scatters the batch, copies weights, computes, gathers
            loss = train_set.loss(logits, labels)
            scaler.scale(loss).backward()  # DP: sums the replicas' gradients on the first GPU
            if args.clip_grad:
                scaler.unscale_(optimizer)  # DP: clipping needs unscaled gradients
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler, scaler=scaler)

        # 6. Evaluate
        run.report(common.evaluate(replica, eval_loader, device))  # DP: on the first GPU
        run.save_then_exit_if_asked(model, optimizer, scheduler, scaler=scaler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    common.save_model(args, model.state_dict())
    run.finish(model, optimizer)


if __name__ == "__main__":
    main()
