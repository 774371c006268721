"""The first lines of an agent program, which knows OpenAI's API, the environment and standard input, and no miles."""

CHAT = """
import http.client, json, os, sys

def chat(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "gpt-4o", "messages": messages, "max_tokens": 4}).encode()
    host, _, path = os.environ["OPENAI_BASE_URL"].partition("://")[2].partition("/")
    connection = http.client.HTTPConnection(host)
    connection.request("POST", f"/{path}/chat/completions", body, headers)
    return json.load(connection.getresponse())["choices"][0]["message"]
"""
