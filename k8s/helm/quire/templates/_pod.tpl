{{/* What all pods share. Each is called with (dict "role" … "root" $), and "values" where it needs the role's own. */}}

{{- define "quire.labels" -}}
app.kubernetes.io/name: {{ .role }}
app.kubernetes.io/part-of: quire
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "quire.meta" -}}
name: {{ include "quire.prefix" .root }}-{{ .role }}
labels:
  {{- include "quire.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The beginning of all names: "quire" for a release of that name. */}}
{{- define "quire.prefix" -}}
{{- $name := ternary .Release.Name (printf "%s-quire" .Release.Name) (contains "quire" .Release.Name) }}
{{- $name = .Values.fullnameOverride | default $name }}
{{- if gt (len $name) 39 }}
{{- fail (printf "names begin with %q, which is longer than 39 characters: set fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Labels of what belongs to no role, and of Redis. */}}
{{- define "quire.release" -}}
{app.kubernetes.io/part-of: quire, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}
{{- define "quire.redis" -}}
{app.kubernetes.io/name: redis, app.kubernetes.io/part-of: quire, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}

{{- define "quire.cluster-secret" }}{{ .Values.clusterSecret.name | default (printf "%s-cluster" (include "quire.prefix" .)) }}{{ end }}
{{- define "quire.redis-secret" }}{{ .Values.redis.secret | default (printf "%s-redis" (include "quire.prefix" .)) }}{{ end }}
{{- define "quire.objects-secret" }}{{ .Values.objects.secret | default (printf "%s-object-tier" (include "quire.prefix" .)) }}{{ end }}

{{/* Every address of the pod, and the pod's own for others. */}}
{{- define "quire.any" }}{{ ternary "[::]" "0.0.0.0" .Values.ipv6 }}{{ end }}
{{- define "quire.address" }}{{ ternary "[$(POD_IP)]" "$(POD_IP)" .Values.ipv6 }}{{ end }}

{{/* Bytes of a Kubernetes quantity: 100Gi, or a number. */}}
{{- define "quire.bytes" -}}
{{- $text := toString . }}
{{- if kindIs "float64" . }}{{ $text = . | int64 | toString }}{{ end }}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824
      "Ti" 1099511627776 "Pi" 1125899906842624 }}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text }}
{{- $unit := trimPrefix $number $text }}
{{- if or (not $number) (not (hasKey $units $unit)) }}
{{- fail (printf "%q is no quantity of bytes as 100Gi, 64G or 17179869184" $text) }}
{{- end }}
{{- mulf (float64 $number) (float64 (get $units $unit)) | int64 }}
{{- end }}

{{- define "quire.image" -}}
{{- $name := printf "quire-%s" .role }}
{{- if and (eq .role "decoder") .root.Values.decoder.gpus }}{{ $name = "quire-decoder-cuda" }}{{ end }}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end }}{{ $name }}
{{- with index .root.Values.image.digests .role }}@{{ . }}{{ else }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* The values that every role may have, the role's own before those of all. */}}
{{- define "quire.own" -}}
{{- $own := deepCopy .root.Values.pods }}
{{- range $name := keys $own }}
{{- if hasKey $.values $name }}{{ $_ := set $own $name (index $.values $name) }}{{ end }}
{{- end }}
{{- toYaml $own }}
{{- end }}

{{/* The pod's template, to its containers. "pins": it registers memory with the RDMA NIC. */}}
{{- define "quire.pod" -}}
{{- $own := include "quire.own" . | fromYaml }}
metadata:
  labels:
    {{- include "quire.labels" . | nindent 4 }}
    {{- with omit $own.podLabels "app.kubernetes.io/name" "app.kubernetes.io/part-of" "app.kubernetes.io/instance" }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "quire.config" .root | sha256sum }}
    {{- with $own.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  terminationGracePeriodSeconds: {{ .grace }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $own.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if $own.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $own.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := $own.tolerations }}
  {{- if and (eq .role "decoder") .values.gpus }}
  {{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $pins := and .pins .root.Values.rdma.enabled .root.Values.rdma.root }}
  securityContext:
    runAsNonRoot: {{ not $pins }}
    runAsUser: {{ ternary 0 10001 $pins }}
    runAsGroup: 10001
    fsGroup: 10001
    {{- if and (eq .role "storage") .root.Values.ioUring.enabled }}
    seccompProfile: {type: Localhost, localhostProfile: {{ .root.Values.ioUring.profile }}}
    {{- else }}
    seccompProfile: {type: RuntimeDefault}
    {{- end }}
  {{- if $own.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml $own.topologySpreadConstraints | nindent 4 }}
  {{- else }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq .role "storage") }}
      labelSelector:
        matchLabels: {{- include "quire.labels" . | nindent 10 }}
    {{- if eq .role "storage" }}
    - maxSkew: 1
      topologyKey: topology.kubernetes.io/zone
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "quire.labels" . | nindent 10 }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* The parts of a container that are the same for all. */}}
{{- define "quire.from" -}}
envFrom:
  - configMapRef: {name: {{ include "quire.prefix" .root }}}
  - secretRef: {name: {{ include "quire.cluster-secret" .root }}}
  - secretRef: {name: {{ include "quire.redis-secret" .root }}, optional: true}
  {{- if has .role (list "gateway" "storage") }}
  - secretRef: {name: {{ include "quire.objects-secret" .root }}, optional: true}
  {{- end }}
{{- end }}

{{- define "quire.env" -}}
{{- range $name, $value := .values.env }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{/* "starts": seconds of the startup probe; "ready": the path of the readiness probe, asked each "every" seconds. */}}
{{- define "quire.rest" -}}
readinessProbe:
  httpGet: {path: {{ .ready | default "/readyz" }}, port: metrics}
  periodSeconds: {{ .every | default 2 }}
livenessProbe:  # by HTTP: a frontend that is at its limit of requests is not dead
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  failureThreshold: 6
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 2
  failureThreshold: {{ div .starts 2 }}
{{- $resources := deepCopy .values.resources }}
{{- if and .pins .root.Values.rdma.enabled }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .root.Values.rdma.resource "1")) }}
{{- if eq .role "storage" }}
{{- /* The arena lies in the huge pages. */}}
{{- $resources = mergeOverwrite $resources (dict
      "requests" (dict "memory" "4Gi") "limits" (dict "memory" "4Gi" "hugepages-2Mi" .root.Values.rdma.hugePages)) }}
{{- end }}
{{- end }}
{{- if and (eq .role "decoder") .values.gpus }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" (.values.gpus | toString))) }}
{{- end }}
resources: {{- toYaml $resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if and .pins .root.Values.rdma.enabled .root.Values.rdma.root }}
    add: [IPC_LOCK]
    {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if eq .role "storage" }}
  - {name: drive, mountPath: /var/lib/quire}
  {{- if .root.Values.sharedMemory.enabled }}
  - {name: sockets, mountPath: /run/quire}
  {{- end }}
  {{- end }}
  {{- if .root.Values.tls.enabled }}
  - {name: certs, mountPath: /etc/quire/certs, readOnly: true}
  {{- if eq .role "gateway" }}
  - {name: public, mountPath: /etc/quire/public, readOnly: true}
  {{- end }}
  {{- end }}
  {{- $own := include "quire.own" . | fromYaml }}
  {{- with $own.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "quire.volumes" -}}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 2Gi}
  {{- if and (eq .role "storage") .root.Values.sharedMemory.enabled }}
  - {name: sockets, hostPath: {path: {{ .root.Values.sharedMemory.folder }}, type: DirectoryOrCreate}}
  {{- end }}
  {{- if .root.Values.tls.enabled }}
  - {name: certs, secret: {secretName: {{ include "quire.prefix" .root }}-{{ .role }}-tls, defaultMode: 0440}}
  {{- if eq .role "gateway" }}
  - {name: public, secret: {secretName: {{ include "quire.prefix" .root }}-public-tls, defaultMode: 0440}}
  {{- end }}
  {{- end }}
  {{- $own := include "quire.own" . | fromYaml }}
  {{- with $own.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Where a member is, for the others: its name, or its address. */}}
{{- define "quire.self" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{- define "quire.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "quire.meta" . | nindent 2 }}
spec:
  {{- if eq .role "storage" }}
  maxUnavailable: 1
  {{- else }}
  minAvailable: 1
  {{- end }}
  selector:
    matchLabels: {{- include "quire.labels" . | nindent 6 }}
{{- end }}

{{- define "quire.scaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "quire.meta" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "quire.prefix" .root }}-{{ .role }}}
  minReplicas: {{ .values.minReplicas }}
  maxReplicas: {{ .values.maxReplicas }}
  metrics:
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: 70}}
    {{- if and (eq .role "gateway") .root.Values.monitoring.enabled }}
    # By what they do; the metrics come by prometheus-adapter with observability/prometheus-adapter.yaml.
    - type: Pods
      pods:
        metric: {name: quire_gateway_transfers}
        target: {type: AverageValue, averageValue: "64"}
    - type: Pods
      pods:
        metric: {name: quire_lookup_seconds_p99}
        target: {type: AverageValue, averageValue: 20m}
    {{- end }}
    {{- if and (eq .role "decoder") .root.Values.monitoring.enabled }}
    # By the latents that wait for the devices of a pod or are being decoded.
    - type: Pods
      pods:
        metric: {name: quire_decoder_queue}
        target: {type: AverageValue, averageValue: "{{ mul .values.queue (max 1 (int .values.gpus)) }}"}
    {{- end }}
  behavior:
    scaleDown: {stabilizationWindowSeconds: 300}
{{- end }}
