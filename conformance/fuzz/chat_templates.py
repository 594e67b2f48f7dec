"""Chat templates in the formats of several families of models."""

FOR = "{%- for message in messages -%}"
BODY = """{{- %s }}
{%%- if message['role'] == 'assistant' -%%}<mark>{{- %s }}<end>{%%- else -%%}{{ %s }}{%%- endif -%%}
{%%- endfor -%%}"""
PROMPT = "{%%- if add_generation_prompt -%%}{{ %s }}{%%- endif -%%}"


def _body(header: str, others: str, assistant: str) -> str:
    """Return the body of the loop: the expressions of a message's beginning, and of its rest by role."""
    return BODY % (header, assistant, others)


_CHATML = "message['content'] + '<|im_end|>\\n'"
_LLAMA3 = "message['content'] | trim + '<eot>'"
_ZEPHYR = "message['content'] + eos_token + '\\n'"
_ALPACA = "message['content'] + '\\n\\n'"
_FORMATS = {
    "ChatML": FOR
    + _body("'<|im_start|>' + message['role'] + '\\n'", _CHATML, _CHATML)
    + PROMPT % "'<|im_start|>assistant\\n'",
    "Llama 3": "{{ '<begin>' }}"
    + FOR
    + _body("'<header>' + message['role'] + '</header>\\n\\n'", _LLAMA3, _LLAMA3)
    + PROMPT % "'<header>assistant</header>\\n\\n'",
    "Llama 2": """{%- set system = '' -%}{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
{%- set first = system if loop.first else '' -%}"""
    + _body(
        "(bos_token or '') + '[INST] ' if message['role'] == 'user' else ''",
        "(first + message['content']) | trim + ' [/INST]'",
        "' ' + message['content'] | trim + ' ' + eos_token",
    ),
    "Zephyr": FOR + _body("'<|' + message['role'] + '|>\\n'", _ZEPHYR, _ZEPHYR) + PROMPT % "'<|assistant|>\\n'",
    "Alpaca": FOR
    + _body("'### ' + ('Assistant' if message['role'] == 'assistant' else 'User') + ':\\n'", _ALPACA, _ALPACA)
    + PROMPT % "'### Assistant:\\n'",
}
# The same templates, without and with marks around the text that they add for an assistant's message.
TEMPLATES = {name: text.replace("<mark>", "").replace("<end>", "") for name, text in _FORMATS.items()}
MARKED = {
    name: text.replace("<mark>", "{%- generation -%}").replace("<end>", "{%- endgeneration -%}")
    for name, text in _FORMATS.items()
}
CHATML, LLAMA3 = TEMPLATES["ChatML"], TEMPLATES["Llama 3"]
QUESTIONS_MARKED = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
A>{% generation %}{{ message['content'] }}.{% endgeneration %}
{%- else -%}
Q: {{ message['content'] }}
{%- endif -%}
{%- endfor -%}"""

# Templates that do not fit some conversations.
FORGETFUL = """{%- for message in messages -%}
{%- if loop.last or message['role'] == 'user' -%}{{ message['role'] + ': ' + message['content'] + '\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
STRICT = "{{ raise_exception('roles must alternate') }}"
SOMETIMES_MARKED = QUESTIONS_MARKED.replace(
    "A>", "A>{% if message['end'] is defined %}{{ message['content'] }}{% else %}"
).replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
NO_TURNS = "{%- for message in messages -%}{{ message['content'] }}{%- endfor -%}"
TOOLS = "{%- if tools -%}{%- for tool in tools -%}{{ tool | tojson + '\n' }}{%- endfor -%}{%- endif -%}"
