"""Agent loops that the built-in model can play: its words are digits, two directions and the equals sign."""

from __future__ import annotations

from rpcrl import AgentLoop


def brief(data_source, solution_str, ground_truth, extra_info):
    """Pay for few words."""
    return 1.0 / (1 + len(solution_str.split()))


class SortTool(AgentLoop):
    """The model answers; a tool then says ``=`` and what it sorted itself, and the model answers again.

    Every second sample of a prompt also gives a second row: the answer alone.
    """

    async def run(self, prompt, llm):
        transcript = self.transcript(prompt)
        transcript.sampled(await llm.generate(transcript.context, max_new_tokens=6))
        digits = sorted(self.tokenizer.decode(prompt.token_ids).split()[1:-1])
        if transcript.given(self.tokenizer.encode(f"= {' '.join(digits[:2])}")) and transcript.room:
            transcript.sampled(await llm.generate(transcript.context, max_new_tokens=transcript.room))
        outputs = [transcript.output()]
        if prompt.sample_index % 2 and not prompt.validate:
            short = self.transcript(prompt)
            short.sampled(await llm.generate(short.context, max_new_tokens=4))
            outputs.append(short.output())
        return outputs


class OneFails(AgentLoop):
    """One sample of the first prompt fails, whenever it is begun."""

    async def run(self, prompt, llm):
        if prompt.uid == "0-0" and prompt.sample_index == 1:
            raise KeyError("a tool of a test")
        transcript = self.transcript(prompt)
        transcript.sampled(await llm.generate(transcript.context))
        return transcript.output()


class NoRun(AgentLoop):
    """Says nothing of how a sample is made."""
