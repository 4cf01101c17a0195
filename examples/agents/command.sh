#!/bin/sh
# The same in the language of the shell, with curl. It prints its answer, and a grader reads it.
set -eu
messages="{\"role\": \"user\", \"content\": \"$1\"}"
for _ in 1 2 3 4; do
    said=$(curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
        --data "{\"model\": \"$OPENAI_MODEL\", \"messages\": [$messages]}" |
        sed -E 's/.*"content": *"([^"]*)".*/\1/')
    sum=$(echo "$said" | sed -nE 's/^<call>(-?[0-9]+[+-][0-9]+)$/\1/p')
    [ "$sum" ] || break
    messages="$messages, {\"role\": \"assistant\", \"content\": \"$said\"}"
    messages="$messages, {\"role\": \"tool\", \"content\": \"$(($sum))\"}"
done
echo "$said"
