"""POST /v1/embeddings: texts or token ids in, one vector for each back, of length 1."""

from __future__ import annotations

import base64

import flask
import msgspec
import numpy as np
import numpy.typing as npt

from jaxserve.errors import RequestError
from jaxserve.messages import Output
from jaxserve.request import Score
from server.body import read_json
from server.described import Description, described
from server.openai.ask import read_texts
from server.openai.schema import EmbeddingsBody
from server.scores import read_scores
from server.services import Services

#: Inputs of one request, as in OpenAI's API.
MAX_INPUTS = 2048
Vectors = npt.NDArray[np.float32]


def embeddings_blueprint(services: Services) -> flask.Blueprint:
    """The embeddings route."""
    blueprint = flask.Blueprint("embeddings", __name__)

    @blueprint.post("/v1/embeddings")
    @described(Description(body=EmbeddingsBody))
    def embeddings() -> flask.Response:
        """Turns each input into a vector: its hidden states, pooled."""
        body = read_json(EmbeddingsBody, services.config.max_body_bytes)
        model = services.check_model(body.model)
        score = _pooling(services, body)
        texts = read_texts(body.input, param="input", most=MAX_INPUTS)
        prompts = services.prompts.texts(
            texts,
            add_bos=body.add_special_tokens,
            keep_last=body.truncate_prompt_tokens,
            param="input",
        )
        base64_wanted = _base64_wanted(body)
        vectors = _vectors(read_scores(services, prompts, score, param="input"), body)
        count = sum(map(len, prompts))
        answer = {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _base64(vector) if base64_wanted else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
        return flask.Response(msgspec.json.encode(answer), mimetype="application/json")

    return blueprint


def _pooling(services: Services, body: EmbeddingsBody) -> Score:
    _, info = services.engine()
    if info.embeddings == "off":
        raise RequestError(
            "this server makes no embeddings; start it with --embeddings mean or last",
            param="model",
            code="unsupported",
        )
    given = info.embeddings if body.pooling is None else body.pooling
    if given not in (Score.MEAN, Score.LAST):
        raise RequestError(f"pooling is {given[:40]!r}; it must be mean or last", param="pooling")
    return Score(given)


def _base64_wanted(body: EmbeddingsBody) -> bool:
    given = "float" if body.encoding_format is None else body.encoding_format
    if given not in ("float", "base64"):
        raise RequestError(
            f"encoding_format is {given[:40]!r}; it must be float or base64",
            param="encoding_format",
        )
    return given == "base64"


def _vectors(outputs: list[Output], body: EmbeddingsBody) -> Vectors:
    """[N, D] float32. Raises RequestError for `dimensions` that there are not."""
    vectors: Vectors = np.array(
        [np.frombuffer(output.embedding or b"", np.float32) for output in outputs]
    )
    if body.dimensions is not None:
        if not 1 <= body.dimensions <= vectors.shape[1]:
            raise RequestError(
                f"dimensions is {body.dimensions}; this model's vectors have "
                f"{vectors.shape[1]}, so it must be 1 to {vectors.shape[1]}",
                param="dimensions",
            )
        vectors = vectors[:, : body.dimensions]
    if body.normalize is False:
        return vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def _base64(vector: Vectors) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
