"""The commands that `scripts/demo --serve` prints to try."""

from collections.abc import Iterator
from pathlib import Path

from scripts.tools.demo.subjects import Subject


def commands(subject: Subject, url: str, folder: Path) -> Iterator[str]:
    """Yields one command after the other for a runner at `url`. A picture to show is written into `folder`."""
    prompt = subject.sample.replace("\n", "\\n")
    ask = f"curl -N {url}/completion -d"
    yield f"curl {url}/v1/status"
    yield f"curl {url}/v1/tokenize -d 'Hello{subject.end}'"
    if subject.picture is None:
        yield f"""{ask} '{{"Prompt":"{prompt}","Options":{{"num_predict":50}}}}'"""
        yield f"""{ask} '{{"Prompt":"{prompt}","Options":{{"num_predict":50,"stop":["!"]}}}}'"""
        yield f"""{ask} '{{"Prompt":"{prompt}","Options":{{"num_predict":5}},"Logprobs":true,"TopLogprobs":2}}'"""
        return
    file = folder / "picture.png"
    file.write_bytes(subject.picture)
    body = f"""'{{"Prompt":"{prompt}","Options":{{"num_predict":50}},"Media":[{{"id":0,"data":"%s"}}]}}'"""
    yield f"""printf {body} "$(base64 < {file} | tr -d '\\n')" | {ask} @-"""
