"""How far the noise scale of normalising layers is from that of the network.

``python -m benchmarks.noise_of_norms [--steps 300]`` trains a small GPT-2 and a small Llama to
predict the words of a random language, and prints both noise scales, averaged over the last ten
tracked steps, and their ratio.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import gradlens
from benchmarks.problems import Transformers, transformers_library
from gradlens.quantities import GradNoiseScale

WORDS, LENGTH, BATCH, SHOWN = 64, 32, 64, 50
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}


def gpt2() -> nn.Module:
    library = transformers_library()
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = library.GPT2Config(
        vocab_size=WORDS, n_layer=4, n_head=4, n_embd=64, n_positions=LENGTH, **dropout
    )
    return Transformers(library.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    library = transformers_library()
    config = library.LlamaConfig(vocab_size=WORDS, intermediate_size=172, **SIZES)
    return Transformers(library.LlamaForCausalLM(config))


NORMS = {"GPT-2": "*ln_*", "Llama": "*norm*"}
MODELS: Mapping[str, Callable[[], nn.Module]] = {"GPT-2": gpt2, "Llama": llama}


def texts(generator: torch.Generator, chances: Tensor) -> Tensor:
    """``[BATCH, LENGTH + 1]``, each word drawn by the one before it."""
    words = [torch.randint(WORDS, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        words.append(torch.multinomial(chances[words[-1]], 1, generator=generator)[:, 0])
    return torch.stack(words, 1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, generator = build(), torch.Generator().manual_seed(0)
        chances = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=generator), 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tracked = [
            GradNoiseScale(options.every, smoothing=0.9, name="whole"),
            GradNoiseScale(options.every, smoothing=0.9, name="norms", layers=NORMS[name]),
        ]
        cockpit = gradlens.Cockpit(model, tracked)
        for step in range(options.steps):
            words = texts(generator, chances)
            optimizer.zero_grad()
            logits = model(words[:, :-1])
            loss = nn.functional.cross_entropy(logits, words[:, 1:].flatten())
            with cockpit(step, loss=loss):
                loss.backward()
            optimizer.step()
            if (step + 1) % SHOWN == 0:
                latest = {each.name: [*cockpit.history[each.name].values()][-1] for each in tracked}
                whole, norms = (latest[each.name]["value"] for each in tracked)
                text = (
                    f"{name:6} step {step + 1:4} loss {float(loss):5.2f} noise scale {whole:8.1f}"
                )
                print(f"{text}, of norms {norms:8.1f}, ratio {norms / whole:5.2f}", flush=True)
        cockpit.close()


if __name__ == "__main__":
    main()
