#!/bin/sh
# codex.sh FOLDER-OF-THE-RUN PROMPT: points Codex, unmodified, at the policy, and starts it without
# a person. `make clients` installs it.
set -eu
mkdir -p "$HOME/.codex"
cat >"$HOME/.codex/config.toml" <<END
model = "$OPENAI_MODEL"
model_provider = "treadle"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.treadle]
name = "treadle"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
exec "$1"/.clients/npm/node_modules/@openai/codex-linux-x64/vendor/*/bin/codex exec \
  --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json "$2"
