import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import UsageError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("small", "small"),
        ("org/Model-1.5B", "org/Model-1.5B"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("./folder/llama", "llama"),
        ("/folder/Qwen2.5-1.5B/", "Qwen2.5-1.5B"),
    ],
)
def test_a_path_shows_only_its_last_part(model, name):
    assert EngineConfig(model=model).model_name == name
    assert EngineConfig(model=model, served_name="mine").model_name == "mine"


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"page_size": 24}, "--page-size is 24"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"num_pages": 1}, "--num-pages is 1"),
    ],
)
def test_an_impossible_setting_is_refused_by_its_flag(settings, flag):
    with pytest.raises(UsageError, match=flag):
        EngineConfig(**settings).validate()
