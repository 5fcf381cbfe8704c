"""The command ``scanvas bench mixers``; see commands.py."""

from __future__ import annotations

from .commands import DEVICE, argument, command


@command(
    "bench mixers",
    "every mixer: time and memory by resolution, speed of a backbone, accuracy after an equal training, recovery of a "
    "softmax teacher",
    argument("--out", default="runs/bench/mixers", metavar="DIR", help="where rows, table and plot go"),
    argument("--mixers", nargs="+", metavar="NAME", help="by default all; measured in this order, a softmax first"),
    argument("--only", nargs="+", metavar="KIND", help="time, speed, accuracy, recovery; by default all"),
    argument("--data", metavar="DIR", help="folder with train.parquet and test.parquet: columns image and label"),
    argument("--grids", nargs="+", type=int, default=[14, 32, 64, 128], metavar="SIDE", help="sides in tokens"),
    argument("--depth", type=int, default=4, help="blocks of the backbone"),
    argument("--epochs", type=float, default=5.0, help="of training for accuracy, and of the teacher"),
    argument("--recover-epochs", type=float, default=0.5, help="of training after the exchange"),
    argument("--seeds", nargs="+", type=int, default=[0]),
    argument("--batch-size", type=int, default=256),
    argument("--lr", type=float, default=1e-3, help="largest learning rate"),
    argument("--images", type=int, help="only the first so many of each split"),
    argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts of the mixers, for N processes"),
    argument("--merge", nargs="+", metavar="DIR", help="measure nothing: join what runs left in these folders"),
    DEVICE,
)
def _bench_mixers(args) -> None:
    from .bench_mixers import bench_mixers

    bench_mixers(
        args.out,
        mixers=args.mixers,
        only=args.only,
        data=args.data,
        device=args.device,
        sides=args.grids,
        seeds=args.seeds,
        shard=args.shard,
        merge_from=args.merge,
        depth=args.depth,
        epochs=args.epochs,
        recover_epochs=args.recover_epochs,
        batch=args.batch_size,
        lr=args.lr,
        images=args.images,
    )
