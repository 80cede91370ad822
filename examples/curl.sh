#!/bin/sh
# The API by hand, a call at a time, each with its answer: sh examples/curl.sh [URL]      (GENREC_API_KEY, where keys are asked for)
# Of `make demo` the key is the one in the address that it prints: without it no user is erased, and no engine looked at.
# Works with any model: the items are the service's own most popular ones.
set -eu
url=${1:-http://127.0.0.1:8000}
user=curl-$$

call() {  # call METHOD PATH [BODY [HEADER]]: ends the script where the answer is an error
    echo "# $1 $2 ${3-}" >&2
    curl --silent --show-error --no-buffer --fail-with-body --max-time 30 --request "$1" "$url$2" --header 'content-type: application/json' \
        ${GENREC_API_KEY:+--header "authorization: Bearer $GENREC_API_KEY"} ${3:+--data "$3"} ${4:+--header "$4"}
    echo
}

# What is popular, as nobody did anything: {"items": [{"item_id": "50", "title": ...}, ...]}
popular=$(call POST /v1/recommend '{"user_id": "nobody", "behaviours": [], "k": 3}') || { status=$?; echo "$popular"; exit $status; }
echo "$popular"
set -- $(echo "$popular" | grep -o '"item_id": *"[^"]*"' | sed 's/.*: *"\(.*\)"/\1/')   # ids with spaces or quotes would need jq
a=$1 b=$2 c=$3

behaviours='[{"item_id": "'$a'", "action": "rating", "value": 5, "timestamp": 1700000000}, {"item_id": "'$b'", "timestamp": 1700003600}]'
call POST /v1/recommend '{"user_id": "ada", "k": 3, "behaviours": '"$behaviours"', "explain": true}' 'priority: u=1'
call POST /v1/recommend:batch '{"requests": [{"user_id": "ada", "k": 1}, {"user_id": "bob", "k": 1}]}'
call POST /v1/rank '{"user_id": "ada", "behaviours": '"$behaviours"', "candidates": ["'$a'", "'$b'", "'$c'"]}'

# As it is found: a JSON object a line; accept: text/event-stream for server-sent events.
call POST /v1/recommend '{"user_id": "ada", "k": 3, "behaviours": '"$behaviours"'}' 'accept: application/x-ndjson'

# Tell it what the user does; sent again with the same key, it is stored once. From then on the user's id is enough.
event='{"user_id": "'$user'", "item_id": "'$a'", "action": "rating", "value": 5}'
call POST /v1/events "$event" "idempotency-key: $user"
call POST /v1/events "$event" "idempotency-key: $user"
call POST /v1/recommend '{"user_id": "'$user'", "k": 3}'
call GET "/v1/users/$user/history"
call DELETE "/v1/users/$user/history"

call GET "/v1/items/$a"
call GET '/v1/items?query=e&limit=3'
call GET /v1/backends   # for operators: who serves each stage, and why not another
