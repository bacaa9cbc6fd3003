{{/* What all pods share. Each is called with (dict "role" … "root" $), and "values" where it needs the role's own. */}}

{{- define "quire.labels" -}}
app.kubernetes.io/name: {{ .role }}
app.kubernetes.io/part-of: quire
{{- end }}

{{- define "quire.meta" -}}
name: quire-{{ .role }}
labels:
  {{- include "quire.labels" . | nindent 2 }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "quire.image" -}}
{{- $name := printf "quire-%s" .role }}
{{- if and (eq .role "decoder") .root.Values.decoder.gpus }}{{ $name = "quire-decoder-cuda" }}{{ end }}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end }}{{ $name }}
{{- with index .root.Values.image.digests .role }}@{{ . }}{{ else }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* The pod's template, to its containers. "pins": it registers memory with the RDMA NIC. */}}
{{- define "quire.pod" -}}
metadata:
  labels:
    {{- include "quire.labels" . | nindent 4 }}
  annotations:
    checksum/config: {{ include "quire.config" .root | sha256sum }}
spec:
  terminationGracePeriodSeconds: {{ .grace }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := .values.tolerations }}
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

{{/* The parts of a container that are the same for all. */}}
{{- define "quire.from" -}}
envFrom:
  - configMapRef: {name: quire}
  - secretRef: {name: {{ .root.Values.clusterSecret.name }}}
  - secretRef: {name: {{ .root.Values.redis.secret }}, optional: true}
  {{- if has .role (list "gateway" "storage") }}
  - secretRef: {name: {{ .root.Values.objects.secret }}, optional: true}
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
{{- end }}

{{- define "quire.volumes" -}}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 2Gi}
  {{- if and (eq .role "storage") .root.Values.sharedMemory.enabled }}
  - {name: sockets, hostPath: {path: /run/quire, type: DirectoryOrCreate}}
  {{- end }}
  {{- if .root.Values.tls.enabled }}
  - {name: certs, secret: {secretName: quire-{{ .role }}-tls, defaultMode: 0440}}
  {{- if eq .role "gateway" }}
  - {name: public, secret: {secretName: quire-public-tls, defaultMode: 0440}}
  {{- end }}
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
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: quire-{{ .role }}}
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
