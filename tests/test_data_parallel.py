"""The class that users hold: arguments, the module's own face, meta and compiled modules, shared workers, closing."""

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel
from torchdl_ray.errors import ArgumentError, BackwardError, ClosedError, OutOfSync, UnsupportedError
from torchdl_ray.view import differing


def local(module, workers=2, **options):
    return DataParallel(module, workers, backend="local", timeout_s=30, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": 2.0}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"dim": -1}, "dim"),
        ({"dim": "rows"}, "dim"),
        ({"reduction": "average"}, "reduction"),
        ({"reduction": {"loss": "max"}}, "reduction"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"microbatch_size": True}, "microbatch_size"),
        ({"loss_weight": 3}, "loss_weight"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"resources_per_worker": {"CPU": -1}}, "CPU"),
        ({"use_gpu": "yes"}, "use_gpu"),
    ],
)
def test_wrong_arguments_raise_before_a_cluster_is_started(options, message):
    import ray

    was_running = ray.is_initialized()
    with pytest.raises(ArgumentError, match=message):
        DataParallel(nn.Linear(2, 2), **options)
    assert ray.is_initialized() == was_running


def test_what_is_no_module_is_refused():
    with pytest.raises(ArgumentError, match=r"nn\.Module"):
        DataParallel(lambda x: x, 1, backend="local")
    with local(nn.Linear(2, 2)) as model, pytest.raises(ArgumentError, match="already"):
        local(model)


def test_names_have_no_prefix_and_state_dicts_load_both_ways():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with local(copy.deepcopy(plain)) as model:
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert [n for n, _ in model.named_children()] == [n for n, _ in plain.named_children()]
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert all(type(v) is torch.Tensor and v.device.type == "cpu" for v in state.values())
        other = copy.deepcopy(plain)
        nn.init.ones_(other[0].weight)
        other.load_state_dict(state, strict=True)
        assert torch.equal(other[0].weight, plain[0].weight)
        model.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()}, strict=True)
        assert all(float(w.abs().sum()) == 0 for w in model.run(lambda m: m[0].weight))
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})


def test_a_state_dict_is_a_copy():
    with local(nn.Linear(2, 1)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        state = model.state_dict()
        before = state["weight"].clone()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["weight"], before)
        assert torch.equal(state["weight"], before)


def test_devices_and_dtypes():
    with local(nn.Linear(2, 2)) as model:
        assert model.to("cpu") is model
        assert model.to(torch.device("cpu")) is model
        for cast in (lambda: model.to(torch.float64), lambda: model.double(), lambda: model.half()):
            with pytest.raises(UnsupportedError, match="before"):
                cast()


def test_run_sees_every_replica_and_change_changes_all():
    with local(nn.Linear(2, 2), 3) as model:
        assert model.run(lambda m, k: m.weight.shape[0] + k, 1) == [3, 3, 3]
        assert model.replicas[2].run(lambda m: m.bias.sum()).shape == ()
        model.change(lambda m: nn.init.constant_(m.weight, 2.0))
        assert float(model.module.weight.mean()) == 2.0
        assert len(set(model.check_sync())) == 1


def test_check_sync_names_the_odd_replica():
    def spoil(module):
        module.weight.data[0, 0] += 1

    with local(nn.Linear(2, 2), 3) as model:
        model.replicas[1].run(spoil)
        with pytest.raises(OutOfSync, match=r"weight on ranks \[1\]"):
            model.check_sync()


def test_backward_of_the_model_needs_one_loss():
    with local(nn.Linear(2, 2)) as model:
        with pytest.raises(BackwardError, match="no call"):
            model.backward()
        model(torch.ones(2, 2))
        with pytest.raises(BackwardError, match="0 scalars"):
            model.backward()


def test_use_after_close_says_so_and_the_module_is_plain_again():
    net = nn.Linear(2, 1)
    model = local(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    trained = model.state_dict()
    model.close()
    model.close()
    for use in (lambda: model(torch.ones(2, 2)), lambda: model.run(len), lambda: model.check_sync()):
        with pytest.raises(ClosedError):
            use()
    assert type(net.weight) is nn.Parameter
    assert torch.equal(net.weight, trained["weight"])
    assert "momentum_buffer" in optimizer.state_dict()["state"][0]
    net(torch.ones(4, 2)).sum().backward()  # goes on in one process
    optimizer.step()
    assert "closed" in repr(model)


def test_a_dropped_model_lets_its_workers_go():
    model = local(nn.Linear(2, 1))
    group = model._stream.group
    del model
    gc.collect()
    assert group.workers == []


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def forward(self, x):
        return self.head(self.encode(x))


def test_other_methods_are_as_exact():
    torch.manual_seed(0)
    plain = Encoder().double()
    x = torch.randn(5, 3, dtype=torch.float64)
    with local(copy.deepcopy(plain), 2) as model:
        for encode in (lambda: model.call("encode", x), lambda: plain.encode(x)):
            encode().square().mean().backward()
        assert torch.allclose(model.module.encoder.weight.grad.clone(), plain.encoder.weight.grad, atol=1e-12)
        assert model.module.head.weight.grad is None
        with pytest.raises(ArgumentError, match="decode"):
            model.call("decode", x)


def gan(generator, discriminator):
    torch.manual_seed(0)
    generators = [
        torch.optim.Adam(generator.parameters(), lr=0.01),
        torch.optim.Adam(discriminator.parameters(), lr=0.01),
    ]
    losses = []
    for _ in range(4):
        real, noise = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        generators[1].zero_grad()
        fake = generator(noise)
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss.backward()
        generators[1].step()
        generators[0].zero_grad()
        fooled = F.softplus(-discriminator(fake)).mean()
        fooled.backward()
        generators[0].step()
        losses += [loss.item(), fooled.item()]
    return losses


@pytest.mark.parametrize("shared", [True, False])
def test_a_generator_and_a_discriminator_side_by_side(shared):
    torch.manual_seed(1)
    nets = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    plain = [copy.deepcopy(net.double()) for net in nets]
    expected = gan(*plain)
    with local(nets[0], 2) as generator:
        discriminator = DataParallel(nets[1], workers=generator) if shared else local(nets[1], 2)
        with discriminator:
            assert gan(generator, discriminator) == pytest.approx(expected, abs=1e-12)
            for model, net in zip((generator, discriminator), plain, strict=True):
                for name, value in net.state_dict().items():
                    assert torch.allclose(model.state_dict()[name], value, atol=1e-12, rtol=0)


def test_a_model_on_shared_workers_leaves_them_alone():
    with local(nn.Linear(2, 1), 2) as first:
        second = DataParallel(nn.Linear(2, 1), workers=first)
        workers = first._stream.group.workers
        assert [len(w.state.replicas) for w in workers] == [2, 2]
        second.close()
        first.run(lambda m: None)
        assert [len(w.state.replicas) for w in workers] == [1, 1]
        first(torch.ones(2, 2)).sum().backward()
        with pytest.raises(ClosedError):
            second(torch.ones(2, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.norm(self.embed(x)))


def test_a_module_on_the_meta_device_is_initialised_on_the_workers():
    with torch.device("meta"):
        net = Tied()
    with local(net, 2, seed=3) as model:
        assert len(set(model.check_sync())) == 1
        assert all(model.run(lambda m: m.out.weight is m.embed.weight))
        state = model.state_dict()
        assert set(state) == set(Tied().state_dict())
        assert torch.equal(state["out.weight"], state["embed.weight"])
        assert float(state["norm.running_var"].sum()) == 4.0
        assert net.embed.weight.is_meta
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        F.cross_entropy(model(torch.arange(6)), torch.arange(6)).backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["embed.weight"], state["embed.weight"])


def test_a_meta_module_without_reset_parameters_is_refused_by_name():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

        def forward(self, x):
            return x * self.scale

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(UnsupportedError, match=r"'1' \(Scale\)"):
        local(net)


def test_a_compiled_module_keeps_its_bare_keys():
    net = nn.Linear(2, 2)
    with local(torch.compile(net, backend="eager"), 2) as model:
        assert list(model.state_dict()) == ["weight", "bias"]
        assert model.module is net
        assert torch.allclose(model(torch.ones(4, 2)).fetch(), net(torch.ones(4, 2)), atol=1e-6)
        assert all(model.run(lambda m: m._compiled_call_impl is not None))


def test_views():
    with local(nn.Linear(2, 2), 2) as model:
        assert repr(model) == "DataParallel(Linear, 2 workers on 1 node, cpu; step 0)"
        assert "<table>" in model._repr_html_()
        assert "rank=1" in repr(model.replicas[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_dims": "rows"}, "out_dims"),
        ({"out_dims": {"loss": 1.5}}, "out_dims"),
        ({"output_device": "nonsense"}, "output_device"),
        ({"seed": "a"}, "seed"),
        ({"timeout_s": None}, "timeout_s"),
        ({"workers": nn.Linear(2, 2)}, "workers"),
        ({"name": 3}, "name"),
        ({"runtime_env": 3}, "runtime_env"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        DataParallel(nn.Linear(2, 2), 1, backend="local", **options)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_body_that_was_frozen_before_the_wrapping_trains_once_it_is_thawed(workers):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    plain[0].requires_grad_(False)
    remote = local(copy.deepcopy(plain), workers)
    batches = [torch.randn(5, 3, dtype=torch.float64) for _ in range(6)]
    for model, net in ((plain, plain), (remote, remote.module)):
        optimizer = torch.optim.SGD(net[2].parameters(), 0.1)
        for step, x in enumerate(batches):
            if step == 3:
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": net[0].parameters(), "weight_decay": 0.1})
            optimizer.zero_grad()
            (model(x).square().mean() + 0.01 * sum(p.abs().sum() for p in net.parameters())).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(remote.state_dict()[name], value, rtol=0, atol=1e-12)
    remote.close()


def test_copies_and_pickles_of_the_wrapper_are_refused_and_name_what_works():
    with local(nn.Linear(2, 2)) as model:
        for attempt in (copy.copy, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(UnsupportedError, match=r"deepcopy\(model.module\)"):
                attempt(model)


def test_as_a_part_of_another_module_it_saves_and_loads():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.head = inner, nn.Linear(2, 1)

    with local(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))) as model:
        outer = Outer(model)
        ones = {name: torch.ones_like(value) for name, value in outer.state_dict().items()}
        assert outer.load_state_dict(ones) == Outer(nn.Identity()).load_state_dict(
            {"head.weight": torch.ones(1, 2), "head.bias": torch.ones(1)}
        )
        assert model.run(lambda net: net[0].weight.sum().item()) == [6.0, 6.0]
        wrong = {**ones, "inner.0.weight": torch.ones(4, 4)}
        del wrong["inner.0.bias"]
        with pytest.raises(RuntimeError, match=r"(?s)size mismatch.*weight"):
            outer.load_state_dict(wrong)
        with pytest.raises(RuntimeError, match=r"Missing key.*inner\.0\.bias"):
            outer.load_state_dict({k: v for k, v in ones.items() if k != "inner.0.bias"})


def test_what_is_added_to_the_wrapper_itself_is_refused_at_the_next_call():
    for add in (
        lambda m: setattr(m, "head", nn.Linear(2, 2)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda m: m.register_buffer("mask", torch.ones(2)),
        lambda m: m.register_full_backward_hook(lambda *_: None),
    ):
        with local(nn.Linear(2, 2)) as model:
            add(model)
            with pytest.raises(UnsupportedError, match="of its own"):
                model(torch.ones(3, 2))


def test_submodules_are_found_by_name():
    with local(nn.Sequential(nn.Linear(2, 2))) as model:
        assert model.get_submodule("0") is model.module[0]
        assert model.get_parameter("0.weight") is model.module[0].weight


def test_two_replicas_that_differ_are_both_named():
    assert differing([{"w": "a", "b": "c"}, {"w": "b", "b": "c"}]) == {"w": (0, 1)}
    assert differing([{"w": "a"}, {"w": "b"}, {"w": "a"}]) == {"w": (1,)}


def test_a_model_whose_stream_ended_shows_as_closed():
    model = local(nn.Linear(2, 2))
    model._stream.close(RuntimeError("a worker died"))
    assert "closed" in repr(model)
    assert "closed" in model._repr_html_()
    model.close()
