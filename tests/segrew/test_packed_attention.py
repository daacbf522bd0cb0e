"""Packed rows against each row alone: states, log-probabilities and gradients, for every family and in both forms."""

import warnings

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import log_softmax

from segrew import packed_attention
from segrew.conversations import Conversations, check_head, response_states, response_statistics
from segrew.language_models import load_causal_lm, trunk_of
from segrew.packed_attention import CannotPack, block_mask, mask_function, packed_states
from segrew.packing import lay_out

PACKED = [
    "llama", "qwen3", "qwen3, a sliding layer", "mistral", "mistral, a short window", "phi3", "phi3, a short window",
    "gemma2", "gemma3", "gemma3, a short window", "gpt2", "jetmoe", "qwen2 moe",
]  # fmt: skip
ROWS = Conversations(
    [[5, 6, 7], [8, 9], [5, 6, 7], [10], [5, 6, 7], [8, 9], [21, 22, 23, 24, 25, 26]],
    [[11, 12, 2], [13, 14, 15, 16, 17, 2], [18], [19, 20, 2], [], [21, 2], [31, 32, 33, 34, 35, 36, 37, 2]],
    torch.tensor([True, True, False, True, False, True, True]),
)
APART = Conversations(
    [[5, 6, 7], [8, 9], [10]], [[11, 12, 2], [13, 14, 15, 16], [2]], torch.tensor([True, False, True])
)


def padded_by_hand(model, rows: Conversations, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """States before and at response tokens from the stock model on rows padded on one side: the definition."""
    joined = [p + r for p, r in zip(rows.prompts, rows.responses, strict=True)]
    width = max(map(len, joined))
    shift = [width - len(row) if side == "left" else 0 for row in joined]
    ids = torch.tensor([[0] * s + row + [0] * (width - s - len(row)) for s, row in zip(shift, joined, strict=True)])
    mask = torch.tensor([[s <= j < s + len(row) for j in range(width)] for s, row in zip(shift, joined, strict=True)])
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    states = trunk_of(model)(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
    ).last_hidden_state
    before, at = [], []
    for i, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        first = shift[i] + len(prompt)
        before.append(states[i, first - 1 : first - 1 + len(response)])
        at.append(states[i, first : first + len(response)])
    return torch.cat(before), torch.cat(at)


def with_gradients(model, before, at):
    """The states, and the gradients of a loss that weighs each of their numbers differently."""
    model.zero_grad()
    weights = torch.randn(2, *before.shape, generator=torch.Generator().manual_seed(1))
    (before * weights[0] + at * weights[1]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 10
    return before.detach(), at.detach(), gradients


def assert_alike(found, expected):
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for name, gradient in expected[2].items():
        gap = (found[2][name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert gap < 1e-4, (name, gap)


@pytest.mark.parametrize("rows", [ROWS, APART], ids=["shared prompts", "prompts apart"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_and_padded_states_and_gradients_equal_the_stock_model_s(build_family, name, rows):
    model = build_family(name)
    expected = with_gradients(model, *padded_by_hand(model, rows, "right"))
    assert expected[1].abs().max() > 0.1
    left = padded_by_hand(model, rows, "left")
    torch.testing.assert_close(left[1].detach(), expected[1], atol=1e-5, rtol=1e-5)
    for layout in ("packed", "padded", "padded_left"):
        states = response_states(model, rows, layout=layout)
        assert_alike(with_gradients(model, states.before, states.at), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral, a short window"])
def test_layers_recomputed_in_the_backward_pass_are_packed_there_too(build_family, name, reentrant):
    model = build_family(name)
    expected = with_gradients(model, *padded_by_hand(model, ROWS, "right"))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    stock = trunk_of(model).config._attn_implementation
    calls, attend = [], packed_attention._by_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "_by_blocks", lambda *a, **k: calls.append(0) or attend(*a, **k))
        states = response_states(model.train(), ROWS, layout="packed")
        found = with_gradients(model, states.before, states.at)
    assert len(calls) == 4  # two layers, each run and run again
    assert_alike(found, expected)
    assert trunk_of(model).config._attn_implementation == stock
    again = with_gradients(model, *padded_by_hand(model, ROWS, "right"))  # and the stock pass is itself again
    assert_alike(again, expected)


@pytest.mark.parametrize("name", PACKED)
def test_packed_log_probabilities_equal_the_stock_model_s(build_family, name):
    model = build_family(name)
    with torch.no_grad():
        logprobs, entropy = response_statistics(model, ROWS)
        for row, (prompt, response) in enumerate(zip(ROWS.prompts, ROWS.responses, strict=True)):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
            own = log_softmax(logits, -1)
            expected = own.gather(1, torch.tensor(response).long()[:, None])[:, 0]
            torch.testing.assert_close(logprobs[row, : len(response)].double(), expected, atol=1e-5, rtol=1e-5)
            spread = -(own.exp() * own).sum(-1)
            torch.testing.assert_close(entropy[row, : len(response)].double(), spread, atol=1e-5, rtol=1e-5)


def test_float64_is_kept(build_family):
    logprobs, entropy = response_statistics(build_family("llama").double(), ROWS)
    assert logprobs.dtype == entropy.dtype == torch.float64


@pytest.mark.parametrize("name", PACKED)
def test_heads_of_these_families_are_known_in_every_precision(build_family, name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_head(build_family(name).to(dtype))


@pytest.mark.filterwarnings("ignore:.*padded rows")
@pytest.mark.parametrize("name", ["modernbert decoder", "megatron bert"])
def test_a_head_of_more_than_its_matrix_is_refused(build_family, name, tmp_path):
    build_family(name).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="other log-probabilities than its own logits"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


# -- models that cannot ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, reason",
    [
        ("phimoe, a short window", "sliding window inside its masks"),
        ("gpt_oss", "uses s_aux"),
        ("doge", "more into its masks"),
    ],
)
def test_a_model_that_cannot_be_packed_says_so_once_and_is_padded_and_right(build_family, name, reason):
    model = build_family(name)
    with pytest.warns(UserWarning, match=f"padded rows.*{reason}"):
        states = response_states(model, ROWS)
    for found, expected in zip((states.before, states.at), padded_by_hand(model, ROWS, "right"), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response_states(model, APART)
    with pytest.raises(ValueError, match=f"cannot run on packed rows: .*{reason}"):
        response_states(model, ROWS, layout="packed")
    with pytest.warns(UserWarning, match="padded rows"):  # another model speaks for itself
        response_states(build_family(name), ROWS)


def test_rows_within_a_window_that_only_masks_know_are_packed(build_family):
    model = build_family("phimoe, a short window")
    rows = Conversations([[5, 6], [5, 6]], [[7, 8], [9]], torch.tensor([False, False]))
    states = response_states(model, rows, layout="packed")
    torch.testing.assert_close(states.at, padded_by_hand(model, rows, "right")[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_short_and_long_for_longrope_do_not_share_a_pass(build_family, layout):
    """It turns all positions of a pass by the longest row's length, so that a row would depend on its company."""
    model = build_family("phi3, longrope")
    for rows in (ROWS, APART):
        states = response_states(model, rows, layout=layout)
        alone = [response_states(model, rows.select([row])) for row in range(len(rows))]
        torch.testing.assert_close(states.at, torch.cat([one.at for one in alone]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states.before, torch.cat([one.before for one in alone]), atol=1e-5, rtol=1e-5)
    short, long = packed_states(trunk_of(model), [[5]], [[6]])[0], packed_states(trunk_of(model), [[5]], [[6] * 9])[0]
    assert (short[:2] - long[:2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "family, reason",
    [
        ("Lfm2", "kind conv"),
        ("Qwen3Next", "kind linear_attention"),
        ("Mamba", "kind linear_attention"),
        ("Bloom", "registry"),
    ],
)
def test_layers_that_carry_a_state_or_miss_the_registry_are_refused(small_sizes, family, reason):
    """What attention by blocks would let run from row to row: convolutions, linear attention, recurrence, biases."""
    kinds = {"Lfm2": ["conv", "full_attention"], "Qwen3Next": ["linear_attention", "full_attention"]}
    small = {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "state_size": 2}
    changes = small | ({"layer_types": kinds[family]} if family in kinds else {})
    config = getattr(transformers, f"{family}Config")(**small_sizes | changes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}Model")(config)
    with pytest.raises(CannotPack, match=reason):
        packed_states(model, [[1]], [[2]])


def test_attention_in_both_directions_and_a_state_of_unknown_kind_are_refused(build_family):
    model = build_family("llama")
    model.model._is_stateful = True
    with pytest.raises(CannotPack, match="carry a state"):
        packed_states(model.model, [[1]], [[2]])
    del model.model._is_stateful
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CannotPack, match="takes no positions"):
        patch.setattr(model.model, "forward", lambda input_ids, position_ids, use_cache: None)
        packed_states(model.model, [[1]], [[2]])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CannotPack, match="no arguments of the caller's"):
        own = model.model.forward
        patch.setattr(
            model.model, "forward", lambda input_ids, position_ids, use_cache, **_: own(input_ids, None, position_ids)
        )
        packed_states(model.model, [[1]], [[2]])
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(CannotPack, match="not causal"):
        packed_states(model.model, [[1]], [[2]])


# -- FlexAttention -----------------------------------------------------------------------------------------------------


def visible_by_definition(prompts, responses, window, multiple):
    """Who sees whom, from the rows themselves: later tokens of a row see earlier ones."""
    rows = lay_out(prompts, responses, multiple=multiple)
    seen = torch.zeros(len(rows.ids), len(rows.ids), dtype=torch.bool)
    for path in rows.paths:
        for i, query in enumerate(path):
            for k in range(max(0, i + 1 - window) if window else 0, i + 1):
                seen[query, path[k]] = True
    return rows, seen


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_the_mask_function_and_its_tiles_say_who_sees_whom(window):
    draw = torch.Generator().manual_seed(0)
    prompts = [[n] * n for n in (3, 150, 3, 40, 150, 150)]
    responses = [[9 + i % 4] * n for i, n in enumerate(torch.randint(0, 90, (6,), generator=draw).tolist())]
    rows, expected = visible_by_definition(prompts, responses, window, 128)
    n, real = len(rows.ids), len(lay_out(prompts, responses).ids)
    function = mask_function(rows, window, torch.device("cpu"))
    places = torch.arange(n)
    found = function(torch.zeros(()), torch.zeros(()), places[:, None], places[None])
    assert torch.equal(found[:real, :real], expected[:real, :real])
    assert not found[:real, real:].any() and not found[real:, :real].any() and found.any(1).all()
    own = block_mask(rows, window, torch.device("cpu")).to_dense()[0, 0].bool()
    needed = create_block_mask(function, None, None, n, n, device="cpu").to_dense()[0, 0].bool()
    assert (own | ~needed).all() and own.shape == needed.shape
    assert not own.all()  # and it leaves tiles out


def test_flex_attention_serves_cuda_where_it_is_a_kernel(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(packed_attention, "has_triton", lambda: True)
    assert packed_attention._form_for(cuda) is packed_attention._form_for(cuda, 16) is packed_attention._by_block_mask
    assert packed_attention._form_for(cuda, 8) is packed_attention._by_blocks
    assert packed_attention._form_for(torch.device("cpu"), 64) is packed_attention._by_blocks
    monkeypatch.setattr(packed_attention, "has_triton", lambda: False)
    assert packed_attention._form_for(cuda) is packed_attention._by_blocks


def test_past_the_limit_of_kernels_it_stops_instead_of_holding_all_pairs(monkeypatch):
    compiled, seen = [], []

    def compile_(function):
        compiled.append(function)
        return lambda *_, **__: (
            seen.append(torch._dynamo.config.recompile_limit)
            or seen.append(torch._dynamo.config.fail_on_recompile_limit_hit)
        )

    monkeypatch.setattr(torch, "compile", compile_)
    before = torch._dynamo.config.recompile_limit
    packed_attention._flex_attention.__wrapped__("cuda")(1, 2, 3)
    assert compiled == [packed_attention.flex_attention] and seen == [packed_attention.KERNELS, True]
    assert torch._dynamo.config.recompile_limit == before < packed_attention.KERNELS


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])])
@pytest.mark.parametrize("name", PACKED)
def test_flex_attention_gives_the_same_states(build_family, name, device, monkeypatch):
    """On CPU FlexAttention runs uncompiled and without gradients; on CUDA as the kernel it is for."""
    model = build_family(name, wider=device == "cuda")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 20, (12,), generator=generator).tolist()
    rows = Conversations(
        [[5 + i % 5] * (3 + 5 * (i % 5)) for i in range(12)],
        [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths],
        torch.zeros(12, dtype=torch.bool),
    )
    expected = [part.detach() for part in padded_by_hand(model, rows, "right")]
    monkeypatch.setattr(packed_attention, "_form_for", lambda *_: packed_attention._by_block_mask)
    with torch.no_grad():
        states = response_states(model.to(device), rows, layout="packed")
    for found, other in zip((states.before, states.at), expected, strict=True):
        torch.testing.assert_close(found.cpu(), other, atol=1e-5 if device == "cpu" else 1e-3, rtol=1e-5)


@pytest.mark.cuda
@NO_CUDA
@pytest.mark.parametrize("name", PACKED)
def test_gradients_of_flex_attention_are_those_of_the_blocks(build_family, name, monkeypatch):
    model = build_family(name, wider=True).cuda()
    outcomes = []
    for form in (packed_attention._by_blocks, packed_attention._by_block_mask):
        monkeypatch.setattr(packed_attention, "_form_for", lambda *_, form=form: form)
        states = response_states(model, ROWS, layout="packed")
        model.zero_grad()
        (states.before.square().sum() + states.at.sum()).backward()
        outcomes.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for parameter, gradient in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][parameter], gradient, atol=1e-3, rtol=1e-3, msg=parameter)


def test_the_mask_function_gives_the_gradients_of_the_blocks():
    """Attention under the function's mask, written out, and attention by blocks."""
    prompts, responses = [[1] * 5, [1] * 5, [2] * 3], [[3] * 4, [3] * 6, [3] * 2]
    rows = lay_out(prompts, responses)
    n = len(rows.ids)
    draw = torch.Generator().manual_seed(0)
    query, key, value, weight = torch.randn(4, 1, 2, n, 8, generator=draw, dtype=torch.float64).unbind(0)
    for window, softcap in ((None, None), (3, None), (3, 0.7), (None, 0.7)):
        outcomes = []
        for form in ("blocks", "function"):
            inputs = [x.clone().requires_grad_() for x in (query, key, value)]
            if form == "blocks":
                output = packed_attention._by_blocks(
                    *inputs, rows, scaling=0.3, window=window, softcap=softcap, dropout=0.0
                )
            else:
                places = torch.arange(n)
                zero = torch.zeros(())
                mask = mask_function(rows, window, torch.device("cpu"))(zero, zero, places[:, None], places[None])
                scores = inputs[0] @ inputs[1].mT * 0.3
                if softcap:
                    scores = packed_attention._cap(softcap)(scores, zero, zero, zero, zero)
                output = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ inputs[2]
            (output * weight).sum().backward()
            outcomes.append([output.detach(), *(x.grad for x in inputs)])
        for found, expected in zip(*outcomes, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
