"""Ask a running genrec for recommendations, as a stream: each stage's backend, items as they are found, and the answer with its reasons.

python examples/recommend.py                        # beside `make demo` or `genrec serve`
python examples/recommend.py http://HOST:8000       # GENREC_API_KEY, where keys are asked for
"""

import json
import os
import sys

import httpx

REQUEST = {
    "user_id": "ada",
    "k": 3,
    "behaviours": [
        {"item_id": "50", "action": "rating", "value": 5, "timestamp": 881250949},  # Star Wars
        {"item_id": "181", "action": "rating", "value": 4, "timestamp": 881251100},  # Return of the Jedi
        {"item_id": "172", "action": "rating", "value": 5, "timestamp": 881252000},  # The Empire Strikes Back
    ],
    "request_time": 881253000,
    "strategy": "unified",  # or retrieval, generative
    "diversity": 0.2,
    "explain": True,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    headers = {"accept": "application/x-ndjson"}
    if key := os.environ.get("GENREC_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    with httpx.stream("POST", f"{url}/v1/recommend", json=REQUEST, headers=headers, timeout=30) as response:
        if not response.is_success:
            sys.exit(response.read().decode())
        for line in response.iter_lines():
            event = json.loads(line)
            match event:
                case {"type": "stage", "data": data}:
                    print(f"{data['stage']}: {data['backend']} in {data['duration_ms']:.1f} ms")
                case {"type": "item", "data": data}:
                    print(f"  found by {data['stage']}: {data['title']}")
                case {"type": "answer", "data": data}:
                    for item in data["items"]:
                        near = ", ".join(seen["title"] for seen in item["explanation"]["similar"])
                        print(f"{item['title']}   near {near}")
                case _:
                    print(event)


if __name__ == "__main__":
    main(*sys.argv[1:])
