"""
Store language-model rollouts: prompts, ragged tokens, rewards
==============================================================

In reinforcement learning of a language model, the model answers prompts, the answers are scored,
and answers with good scores become more likely. An answer is a text, a list of tokens of any
length, a log-probability for each token, and one reward. In four separate lists, these get out of
step. Here one answer is one container, and all answers are a batch.
"""

# %%
# Make a very small model
# -----------------------
#
# The model is a table: for each prompt, position and last token, the probability of the next
# token. It has ten words, and knows nothing at first. The code around it would be the same for a
# large model.

import tempfile

import matplotlib.pyplot as plt
import torch

from tensordict import TensorDict, lazy_stack, load

torch.manual_seed(0)
WORDS = ["<end>", "hello", "and", "red", "blue", "green", "one", "two", "three", "four"]
PROMPTS = ["Say hello, nothing else.", "Name three colours.", "Count to four."]
END, LONGEST, GROUP, UPDATES = 0, 12, 16, 120
table = torch.zeros(len(PROMPTS), LONGEST, len(WORDS), len(WORDS), requires_grad=True)
optimizer = torch.optim.Adam([table], lr=0.1)


def reward(prompt, words):
    """Return the share of the requested words in the answer, less a little for each extra word."""
    if prompt == PROMPTS[0]:
        right, wanted = int("hello" in words), 1
    elif prompt == PROMPTS[1]:
        right, wanted = len({"red", "blue", "green"} & set(words)), 3
    else:
        right, wanted = sum(word == number for word, number in zip(words, WORDS[-4:])), 4
    return max(0.0, right / wanted - 0.04 * (len(words) - right))


# %%
# Sample answers as containers
# ----------------------------
#
# All prompts are answered at once, a few times each. The sampler works on a square, so tokens
# after the end of an answer are cut off. Texts are entries like tensors; a lazy stack holds
# members of any length.


@torch.no_grad()
def roll_out():
    task = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)
    tokens = torch.full((len(task), LONGEST + 1), END)
    for place in range(LONGEST):
        scores = table[task, place, tokens[:, place]]
        tokens[:, place + 1] = scores.softmax(-1).multinomial(1).squeeze(1)
    answers = []
    for number, row in zip(task.tolist(), tokens[:, 1:]):
        ends = (row == END).nonzero()
        row = row[: int(ends[0]) + 1] if len(ends) else row
        words = [WORDS[token] for token in row if token != END]
        answer = {"prompt": PROMPTS[number], "task": number, "text": " ".join(words), "tokens": row}
        answers.append(TensorDict(answer | {"reward": reward(PROMPTS[number], words)}))
    return lazy_stack(answers)


print(roll_out()[24])

# %%
# Pad for one computation
# -----------------------
#
# The log-probabilities of all answers are computed at once, on padded tokens. ``get`` pads them
# and returns the mask; the stack itself stays unchanged.


def log_probability(answers):
    tokens, mask = answers.get("tokens", as_padded_tensor=True, padding_value=END, return_mask=True)
    last = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=END)
    scores = table[answers["task"].unsqueeze(1), torch.arange(tokens.shape[1]), last]
    return scores.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1), mask


# %%
# Learn
# -----
#
# An answer is good if it is better than other answers to the same prompt (this is the idea of
# GRPO). Answers are in the order of the prompts, so their rewards are a matrix with a row for
# each prompt.

history = []
for update in range(UPDATES):
    answers = roll_out()
    answers["update"] = torch.full([len(answers)], update)
    history.append(answers)
    rewards = answers["reward"].view(len(PROMPTS), GROUP)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.05)
    log_probabilities, mask = log_probability(answers)
    loss = -(advantage.view(-1, 1) * log_probabilities * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# Save all answers
# ----------------
#
# All answers of all updates form one container again. A folder holds it in two files for the
# tokens: one with the tokens of all answers, and one with their lengths. A loaded save is mapped:
# reading rewards reads the rewards only.

folder = tempfile.TemporaryDirectory()
torch.cat(history).save(folder.name + "/rollouts")
saved = load(folder.name + "/rollouts")
tokens = saved.get("tokens", as_list=True)
print(len(saved), "answers of", sum(map(len, tokens)), "tokens; padded:", len(saved) * LONGEST)
best = saved[saved["reward"] == 1]
print("the first perfect answer:", best[0]["text"], "in update", best[0]["update"].item())

# %%
# Show the progress
# -----------------
#
# On the right are answers of the first update and of the last, a row each; a word is the darker
# the more likely it is to the trained model. For real models and instructions,
# ``tensordict.llm.IFEvalScorer`` writes such rewards.

figure = plt.figure(figsize=(14, 4.6), layout="constrained")
left, *tables = figure.subplots(1, 3, width_ratios=[1, 1.3, 1.3])
curves = saved["reward"].view(UPDATES, len(PROMPTS), GROUP)
for prompt, curve in zip(PROMPTS, curves.unbind(1)):
    line = left.plot(curve.mean(1), label=prompt)
    band = curve.quantile(torch.tensor([0.2, 0.8]), 1)
    left.fill_between(range(UPDATES), *band, color=line[0].get_color(), alpha=0.2)
left.set(title="Rewards", xlabel="update", ylim=(-0.02, 1.02))
left.legend(frameon=False, loc="lower right")
for axes, update in zip(tables, (0, UPDATES - 1)):
    some = saved[saved["update"] == update][::4]
    with torch.no_grad():
        log_probabilities, mask = log_probability(some)
    shade = log_probabilities.exp().where(mask, torch.nan)
    axes.imshow(shade.numpy(), cmap="Blues", vmin=0, vmax=1.8, aspect="auto")
    for row, member in enumerate(some.get("tokens", as_list=True)):
        for column, token in enumerate(member):
            axes.text(column, row, WORDS[token], ha="center", va="center", fontsize=7)
    axes.set(title=f"Answers of update {update}", xlabel="token", xlim=(-0.5, LONGEST - 0.5))
    axes.set_yticks([1.5, 5.5, 9.5], [prompt.split()[0] for prompt in PROMPTS])
    axes.hlines([3.5, 7.5], -0.5, LONGEST - 0.5, color="black", linewidth=0.8)
plt.show()
folder.cleanup()
