#!/usr/bin/env bash
# Keys and certificates for a SuperLink and its SuperNodes, in DIR:
#   certificates.sh DIR HOST NODE…      such as   certificates.sh tls link.example.org hospital clinic
# The model's owner keeps server.key and gives every node ca.pem. Each node makes its own NODE key, with the last command
# below, and sends NODE.pub only. HOST is what nodes connect to: a name, or localhost to try it on one machine.
set -euo pipefail
dir=$1 host=$2
shift 2
mkdir -p "$dir"
cd "$dir"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 365 -keyout ca.key -out ca.pem -subj "/CN=mpu rounds" \
  -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" 2> openssl.log
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -keyout server.key -out server.csr -subj "/CN=$host" 2>> openssl.log
names="DNS:$host"
[ "$host" = localhost ] && names="DNS:localhost,IP:127.0.0.1"
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -out server.pem \
  -extfile <(printf 'subjectAltName=%s' "$names") 2>> openssl.log
head -c 32 /dev/urandom > superexec.secret
chmod 600 ca.key server.key superexec.secret
for node in "$@"; do
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "$node" -f "$node"
done
rm -f server.csr openssl.log
