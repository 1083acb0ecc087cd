"""Train on one device in pure half precision: what it saves, and what it loses.

Differs     from pytorch_SingleGPU.py: parameters, gradients and optimizer state are float16 or
            bfloat16. --master-weights adds an fp32 copy of the weights for the optimizer, keeps
            BatchNorm in fp32, and scales the loss. Lines tagged "# half:".
Command:    python pytorch_half_precision.py
            python pytorch_half_precision.py --master-weights
Use it      to see why mixed precision exists: in pure half precision an update of less than 1/2048
            (float16) or 1/256 (bfloat16) of a weight is rounded away, and training stalls. With
            --master-weights it does not. For your own work use pytorch_auto_mixed_precision.py.
Holds       2 bytes per parameter, 2 for its gradient, 2 (SGD with momentum) or 4 (AdamW) for the
            optimizer; with --master-weights 4 more for the copy, and 4 or 8 for the optimizer.
            Activations take half of their fp32 memory.
Sends       nothing.
"""

import copy

import torch
from torch import nn
from torch.utils.data import RandomSampler

import common
from jobs.model_parts import batch_norms


def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"],
        help="dtype of weights and compute (default: float16 on a GPU, bfloat16 on a CPU)",
    )  # fmt: skip
    parser.add_argument("--master-weights", action="store_true", help="keep fp32 master weights")
    parser.add_argument(
        "--loss-scale", type=common.number(float, 1), default=128, metavar="X",
        help="loss scale; a power of two causes no rounding (default: 128)",
    )  # fmt: skip
    args = common.parse_args(parser)
    common.prepare_process(args)
    if args.optimizer == "adamw" and args.dtype == "float16" and not args.master_weights:
        common.fail("--optimizer adamw: its eps is 0 in float16; add --master-weights")
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
    if args.master_weights:  # half: model keeps the fp32 weights, and half_model computes
        half_model = half_copy(model, dtype)
        loss_scale = args.loss_scale
        pairs = list(zip(model.parameters(), half_model.parameters(), strict=True))
    else:
        half_model = to_half(model, dtype)  # half: the same object
        loss_scale = 1
        pairs = []

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)
    with torch.no_grad():
        for weight, half in pairs:
            half.copy_(weight)  # half: a snapshot may have changed them

    # 5. Train
    for epoch in run.epochs_left():
        generator.manual_seed(args.seed + epoch)  # a new order every epoch
        model.train()
        half_model.train()
        for inputs, labels in run.batches(train_loader, epoch, dtype):  # half: in this dtype
            half_model.zero_grad()  # otherwise gradients would accumulate
            logits = half_model(inputs).float()  # half: the softmax needs fp32 precision
            loss = train_set.loss(logits, labels)
            (loss * loss_scale).backward()  # half: keeps gradients that float16 would round to 0
            for weight, half in pairs:
                if half.grad is not None:
                    weight.grad = half.grad.float().div_(loss_scale)
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for weight, half in pairs:
                    half.copy_(weight)  # half: rounds
                    weight.grad = None  # half: fp32 gradients are needed only in this step
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        run.report(common.evaluate(model, eval_loader, device))
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    common.save_model(args, model.state_dict())
    held = {"master_weights": model.parameters()} if args.master_weights else {}
    run.finish(half_model, optimizer, **held)


def to_half(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters, and BatchNorm's running statistics. Other buffers stay in fp32: they count
    the tokens of experts, or add up small steps."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for norm in batch_norms(model):
        norm.to(dtype)
    return model


def half_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A working copy in half precision. BatchNorm stays in fp32 and is shared with the model, not
    copied: its parameters are few, and its running statistics move by small steps. All buffers are
    shared, so what forward counts is what the optimizer's step finds."""
    norms = {id(module): module for module in batch_norms(model)}
    buffers = {id(buffer): buffer for buffer in model.buffers()}
    half_model = copy.deepcopy(model, memo=norms | buffers)
    for module in half_model.modules():
        if id(module) not in norms:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return half_model


if __name__ == "__main__":
    main()
