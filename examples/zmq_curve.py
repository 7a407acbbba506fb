"""An encrypted connection that only known keys may open: python examples/zmq_curve.py ENDPOINT FOLDER

Make the keys:     python -m glm_runtime.gateway keygen FOLDER server client
Let the client in: mkdir FOLDER/authorized; cp FOLDER/client.key FOLDER/authorized
Serve:             python -m glm_runtime.launch_server --zmq-endpoint tcp://*:5557
                       --zmq-curve-secret-key-file FOLDER/server.key_secret --zmq-authorized-keys FOLDER/authorized
The client needs FOLDER/client.key_secret and FOLDER/server.key, which is public.
"""

import sys

from glm_runtime.client import Client, Lost

endpoint, folder = sys.argv[1], sys.argv[2]

with Client(endpoint, key_file=f"{folder}/client.key_secret", server_key=f"{folder}/server.key") as client:
    print(client.hello()["model"], "says", repr(client.generate("Hello", max_new_tokens=8, temperature=0).text))

with Client(endpoint, lost_after=1.0) as stranger:
    try:
        stranger.ping()
    except Lost as lost:
        print("without a key:", lost)
