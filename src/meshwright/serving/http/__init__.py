"""Model behind an HTTP address with OpenAI's interface: requests come in, answers leave while they grow.

In the process that has the model:

    http_server      the address, signals, and the start and end of the other process
    engine_thread    the model, its engine, and the engine's thread: commands in, one message per step out

Between the two: `channel` (frames and their contents, and the errors that clients receive).

In the HTTP process, which has no torch:

    front            the loop: start, draining, end; keys, hosts, headers, which every request passes
    routes           bodies of requests                   -> documents of answers
    request_fields   JSON                                 -> checked fields; tools, and calls in answers
    prompt_reader    text and conversations               -> token ids, in separate processes
    engine_link      tasks to the engine's process, and news from there; metrics of both
    engine_task      fields -> prompts for the engine, whose answers become text token by token
    answering        the answers to one HTTP request, as they grow
    answer_documents                                      the JSON of answers
    event_stream                                          -> server-sent events on a connection

Nothing here reads the environment.
"""
