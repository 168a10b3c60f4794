"""Data: a batch's items are pulled before it starts and agreed on by all ranks; epochs of ``training_data``; labels as messages."""

from collections import deque
from typing import Any, Callable, Deque, Iterator, Optional

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineError

from ..config import ConfigError
from .channels import Message


class BatchQueue:
    """The items of the batch that runs.

    Args:
        group: a group of all ranks, on which they agree that everybody has its items; None: nobody asks.
    """

    def __init__(self, group):
        self.group = group
        #: whether the next batch's items are here
        self.pulled = False
        self._items: Deque = deque()

    def pop(self) -> Any:
        return self._items.popleft()

    def pull(self, next_item: Callable[[], Any], count: int) -> None:
        """Take ``count`` items (0 on a rank that loads nothing).

        Raises:
            StopIteration: any rank's data ended.
            Exception: what ``next_item`` raised here; PipelineError where another rank's raised it.
        """
        error: Optional[Exception] = None
        self._items.clear()
        try:
            self._items.extend(next_item() for _ in range(count))
        except Exception as caught:
            # a generator turns the iterator's StopIteration into a RuntimeError that it caused
            error = caught.__cause__ if isinstance(caught.__cause__, StopIteration) else caught
        if self.group is not None:
            # the highest rank whose data failed, and whether they just ended
            verdict = torch.tensor([-1 if error is None else 2 * dist.get_rank() + (not isinstance(error, StopIteration))])
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=self.group)
            rank, failed = divmod(int(verdict), 2)
            if error is None and rank >= 0:
                if failed:
                    error = PipelineError(f"the data iterator of rank {rank} raised an error; this batch was not started")
                else:
                    error = StopIteration(f"the data of rank {rank} ended")
        if error is not None:
            self._items.clear()
            raise error
        self.pulled = True


class EpochLoader:
    """Endless micro-batches of a replica's share of a dataset, epoch after epoch; its own iterator, as DeepSpeed's RepeatingLoader.

    Args:
        make_loader: ``deepspeed_io`` of the engine: called with the dataset and ``data_sampler=``.
        dataset: map-style.
        replicas, replica: D, and which of them this is.
        shuffle: each epoch is a permutation that depends on ``seed`` and the epoch; else in order.
        workers: processes that read ahead; None: DeepSpeed's default.

    Raises:
        ConfigError: too few items for one micro-batch.
    """

    def __init__(self, make_loader: Callable, dataset, replicas: int, replica: int, shuffle: bool, seed: int,
                 workers: Optional[int]):
        self.sampler = torch.utils.data.distributed.DistributedSampler(dataset, replicas, replica, shuffle=shuffle, seed=seed)
        self.loader = make_loader(dataset, data_sampler=self.sampler, num_local_io_workers=workers)
        self.set_epoch(0)
        if not len(self.loader):
            raise ConfigError(f"training_data has {len(dataset)} items, too few for one micro-batch on each of {replicas} "
                              "replicas; use fewer replicas, a smaller micro-batch, or dataloader_drop_last: false")

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Go on with the first item of this epoch."""
        self._items = self._from(epoch)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._items)

    def _from(self, epoch: int) -> Iterator:
        while True:
            self.sampler.set_epoch(epoch)
            yield from self.loader
            epoch += 1


def check_dataset(dataset) -> None:
    """Raises ConfigError for a dataset that cannot be read by epochs."""
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"training_data is a {type(dataset).__name__} without a length; make a loader of it and call "
                          f"engine.set_dataloader(loader), or pass its iterator to train_batch()")


def check_item(item, reads_inputs: bool, labels_travel: bool) -> None:
    """Raises PipelineError unless ``item`` is a pair of inputs and labels that a pipeline can take."""
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise PipelineError(f"an item of the data iterator must be a pair (inputs, labels), got {_form(item)}")
    if reads_inputs and not _tensors(item[0]):
        raise PipelineError(f"inputs must be a tensor or a tuple of tensors, got {_form(item[0])}")
    if labels_travel and item[1] is not None and not _tensors(item[1]):
        raise PipelineError(f"with ds_fold.label_transport labels must be a tensor or a tuple of tensors, got {_form(item[1])}")


def _tensors(value) -> bool:
    return torch.is_tensor(value) or (isinstance(value, (tuple, list)) and all(map(torch.is_tensor, value)))


def _form(value) -> str:
    inner = f" of ({', '.join(type(part).__name__ for part in value)})" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{inner}"


def load_labels(labels, device: torch.device):
    """Labels on ``device``: a tensor, a tuple of tensors, or what is neither as it is."""
    if isinstance(labels, (tuple, list)):
        return tuple(t.to(device) for t in labels)
    return labels.to(device) if torch.is_tensor(labels) else labels


def label_message(labels) -> Message:
    """Labels as a message of :class:`~ds_fold.runtime.channels.Channel`; no labels are a message of nothing."""
    if labels is None:
        return ()
    return labels.detach() if torch.is_tensor(labels) else tuple(t.detach() for t in labels)


def labels_of(message: Message):
    """The inverse of :func:`label_message`."""
    return None if isinstance(message, tuple) and not message else message
