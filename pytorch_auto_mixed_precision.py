"""Train on one device in mixed precision: autocast, GradScaler, gradient clipping.

Differs     from pytorch_SingleGPU.py: matrix products and convolutions run in half precision, while
            weights, reductions and optimizer stay in fp32. Lines tagged "# AMP:".
Command:    python pytorch_auto_mixed_precision.py
            python pytorch_auto_mixed_precision.py --dtype bfloat16 --clip-grad 1
Use it      always, on a GPU with tensor cores or a CPU with AMX. Not where you need full precision,
            and not on hardware without fast half precision, where it only saves memory.
Holds       4 bytes per parameter, 4 for its gradient, and 4 (SGD with momentum) or 8 (AdamW) for
            the optimizer, and during a step 2 for the half-precision copy. Activations that matrix
            products and convolutions read take half of their fp32 memory, others all of it.
Sends       nothing.
"""

import torch
from torch import nn
from torch.utils.data import RandomSampler

import common


def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"],
        help="dtype of autocast (default: float16 on a GPU, bfloat16 on a CPU)",
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

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    # AMP: float16 rounds gradients below 6e-8 to zero, so the loss is scaled up, and the gradients
    # are scaled down before the step. bfloat16 has the range of fp32 and needs no scaling.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler, scaler=scaler)

    # 5. Train
    for epoch in run.epochs_left():
        generator.manual_seed(args.seed + epoch)  # a new order every epoch
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            with torch.autocast(device.type, dtype):  # AMP: forward and loss, not backward
                logits = model(inputs)
                loss = train_set.loss(logits, labels)
            scaler.scale(loss).backward()  # AMP: 1. scale
            if args.clip_grad:
                scaler.unscale_(optimizer)  # AMP: 2. unscale: clipping needs unscaled gradients
                # AMP: 3. clip
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)  # AMP: 4. step, unless a gradient overflowed
            scaler.update()  # AMP: 5. lower the scale after an overflow, else raise it now and then
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler, scaler=scaler)

        # 6. Evaluate
        with torch.autocast(device.type, dtype):  # AMP: as in training
            metrics = common.evaluate(model, eval_loader, device)
        run.report(metrics)
        run.save_then_exit_if_asked(model, optimizer, scheduler, scaler=scaler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    common.save_model(args, model.state_dict())
    run.finish(model, optimizer)


if __name__ == "__main__":
    main()
