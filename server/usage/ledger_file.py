"""What the ledger's file is called and holds; for those that only read it, too."""

from __future__ import annotations

FILE = "usage.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    number INTEGER PRIMARY KEY, ended REAL NOT NULL, day TEXT NOT NULL, request_id TEXT NOT NULL,
    tenant TEXT NOT NULL, model TEXT NOT NULL, route TEXT NOT NULL, answers INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL, queue_seconds REAL NOT NULL, device_seconds REAL NOT NULL,
    finish_reason TEXT NOT NULL, price REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS usage_by_day ON usage (day, tenant);
CREATE TABLE IF NOT EXISTS traces (
    number INTEGER PRIMARY KEY, request_id TEXT NOT NULL, tenant TEXT NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS traces_by_request ON traces (request_id);
"""
