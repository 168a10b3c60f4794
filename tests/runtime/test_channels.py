import pytest
from pool import RankError, RankPool


def _pair():
    import torch
    import torch.distributed as dist

    from ds_fold.runtime.channels import Channel
    return Channel(dist.new_group([0, 1]), 1 - dist.get_rank(), torch.device("cpu")), dist.get_rank()


def messages():
    """Everything that may pass between chunks."""
    import torch
    g = torch.Generator().manual_seed(0)
    yield torch.randn(3, 4, generator=g)
    yield (torch.randn(2, 2, generator=g), )
    yield (torch.arange(5), torch.tensor(True), torch.tensor([[True, False]]), torch.tensor(2.5))
    yield torch.randn(4, 6, generator=g).t()[::2]  # not contiguous
    yield (torch.randn(3, generator=g).bfloat16(), torch.randn(3, generator=g).half(), torch.randn(2, generator=g).double())
    yield (torch.zeros(0, 3), torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1 + 2j]))
    yield torch.randn(2, 3, generator=g).requires_grad_()
    yield (torch.randn(2, generator=g).requires_grad_(), torch.ones(2))


def test_every_kind_of_message_arrives_as_it_left():
    def job():
        import torch
        channel, rank = _pair()
        for i, message in enumerate(messages()):
            if rank == 0:
                channel.send(f"edge {i}", message)
                channel.wait_send()
            else:
                channel.post(f"edge {i}")
                received, spec = channel.wait_receive()
                assert isinstance(received, tuple) == isinstance(message, tuple)
                expected = message if isinstance(message, tuple) else (message, )
                got = received if isinstance(received, tuple) else (received, )
                assert len(got) == len(expected)
                for a, b, s in zip(got, expected, spec.tensors):
                    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.detach())
                    assert s.requires_grad == b.requires_grad
        assert channel.idle
        return True

    assert RankPool.of(2).run(job) == [True, True]


def test_receives_posted_ahead_get_the_messages_in_order():
    def job():
        import torch
        channel, rank = _pair()
        for _ in range(2):  # the second round knows the shapes
            if rank == 0:
                for i in range(6):
                    channel.send(f"edge {i % 2}", torch.full((i % 2 + 1, ), float(i)))
                for _ in range(6):
                    channel.wait_send()
            else:
                for i in range(6):
                    channel.post(f"edge {i % 2}")
                assert [float(channel.wait_receive()[0][0]) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
        return channel.idle

    assert RankPool.of(2).run(job) == [True, True]


def test_gradients_need_no_header_once_their_form_is_told():
    def job():
        import torch
        import torch.distributed as dist

        from ds_fold.runtime.channels import Channel, MessageSpec
        rank = dist.get_rank()
        channel = Channel(dist.new_group([0, 1]), 1 - rank, torch.device("cpu"), with_header=False)
        output = (torch.zeros(2, requires_grad=True), torch.arange(3), torch.zeros(3, requires_grad=True))
        if rank == 0:
            channel.send("edge", (torch.ones(2), torch.full((3, ), 2.0)))
            channel.wait_send()
            return None
        channel.post("edge")  # posted before the forward that tells its form
        channel.expect("edge", MessageSpec.of(output).gradients())
        grads, _ = channel.wait_receive()
        return [g.tolist() for g in grads]

    assert RankPool.of(2).run(job)[1] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize("change", ["shape", "dtype", "count", "requires_grad"])
def test_a_changed_form_is_refused_at_the_sender_before_anything_is_sent(change):
    def job():
        import torch
        channel, rank = _pair()
        first = torch.zeros(2, 3)
        second = {"shape": torch.zeros(1, 3), "dtype": torch.zeros(2, 3).double(), "count": (first, first),
                  "requires_grad": torch.zeros(2, 3, requires_grad=True)}[change]
        if rank == 1:
            channel.post("virtual stage 0 -> 1")
            channel.wait_receive()
            return None
        channel.send("virtual stage 0 -> 1", first)
        channel.wait_send()
        try:
            channel.send("virtual stage 0 -> 1", second)
        except RuntimeError as error:
            assert channel.idle
            return str(error)

    message = RankPool.of(2).run(job)[0]
    assert "virtual stage 0 -> 1" in message and "float32[2, 3]" in message and "dynamic_shape=True" in message
    assert {"shape": "[1, 3]", "dtype": "float64", "count": "(float32", "requires_grad": "requires_grad"}[change] in message


def test_too_many_tensors_are_refused():
    def job():
        import torch
        channel, rank = _pair()
        if rank == 0:
            channel.send("edge", tuple(torch.zeros(1, 1, 1, 1) for _ in range(100)))

    with pytest.raises(RankError, match="100 tensors need 702 words of metadata, more than 512"):
        RankPool.of(2).run(job)
