"""Quire's S3 frontend with boto3, as any S3 server.

AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... python examples/s3_objects.py http://127.0.0.1:7481

`quire keys create NAME` prints a key.
"""

import sys

import boto3
from botocore.config import Config


def main(endpoint: str) -> None:
    s3 = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", config=Config(s3={"addressing_style": "path"})
    )
    s3.create_bucket(Bucket="states")
    s3.put_object(Bucket="states", Key="model/a.kv", Body=bytes(range(256)) * 4096)
    part = s3.get_object(Bucket="states", Key="model/a.kv", Range="bytes=256-511")["Body"].read()
    print("a range of it is right:", part == bytes(range(256)))
    for each in s3.list_objects_v2(Bucket="states", Prefix="model/")["Contents"]:
        print(each["Key"], each["Size"])


if __name__ == "__main__":
    main(sys.argv[1])
