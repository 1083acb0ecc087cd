"""Train on one device, a GPU or the CPU: the baseline that every other script is a diff against.

Command:    python pytorch_SingleGPU.py
Use it      while the model fits one GPU and training is fast enough. Not if a second GPU is idle.
Holds       4 bytes per parameter, 4 for its gradient, and 4 (SGD with momentum) or 8 (AdamW) for
            the optimizer; in addition the activations, which grow with the batch.
Sends       nothing.
"""

import torch
from torch import nn
from torch.utils.data import RandomSampler

import common


def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__)
    args = common.parse_args(parser)
    common.prepare_process(args)
    device = common.get_device(args)
    common.announce(args, device)
    common.seed_everything(args.seed, args.deterministic)

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
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)

    # 5. Train
    for epoch in run.epochs_left():
        generator.manual_seed(args.seed + epoch)  # a new order every epoch
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)
            loss = train_set.loss(logits, labels)
            loss.backward()
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        run.report(common.evaluate(model, eval_loader, device))
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    common.save_model(args, model.state_dict())
    run.finish(model, optimizer)


if __name__ == "__main__":
    main()
