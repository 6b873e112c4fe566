"""Chat data to token ids and loss masks, for any chat template."""

from posttrain_data.errors import DataError
from posttrain_data.options import PreferenceDataOptions, Prepared, Report, SFTDataOptions
from posttrain_data.preferences import prepare_feedback, prepare_preferences
from posttrain_data.rendering import render
from posttrain_data.selection import DatasetOptions, load_datasets
from posttrain_data.sft import prepare_sft
from posttrain_data.sources import DatasetSpec, load_rows
from posttrain_data.templates import clone_chat_template, terminators
from posttrain_data.tiny import tiny_tokenizer

__all__ = [
    "DataError",
    "DatasetOptions",
    "DatasetSpec",
    "PreferenceDataOptions",
    "Prepared",
    "Report",
    "SFTDataOptions",
    "clone_chat_template",
    "load_datasets",
    "load_rows",
    "prepare_feedback",
    "prepare_preferences",
    "prepare_sft",
    "render",
    "terminators",
    "tiny_tokenizer",
]
