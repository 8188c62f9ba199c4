{{- define "rljob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "rljob.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "rljob.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "rljob.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Cluster-scoped objects carry the namespace, so that releases of one name in two namespaces do not meet. */}}
{{- define "rljob.clusterName" -}}
{{- if eq .Release.Namespace (include "rljob.fullname" .) }}
{{- include "rljob.fullname" . }}
{{- else }}
{{- printf "%s-%s" .Release.Namespace (include "rljob.fullname" .) }}
{{- end }}
{{- end }}

{{- define "rljob.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rljob.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "rljob.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end }}
{{- include "rljob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "rljob.serviceAccountName" -}}
{{- if .Values.serviceAccount.name }}
{{- .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}
{{- include "rljob.fullname" . }}
{{- else }}
{{- fail "serviceAccount.name: name the service account that is there, or let serviceAccount.create be true" }}
{{- end }}
{{- end }}

{{- define "rljob.image" -}}
{{- with .Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end }}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* What a schema cannot say: values that are compared with each other. */}}
{{- define "rljob.checkSettings" -}}
{{- with .Values.settings }}
{{- if not (and (lt (float64 .retrySeconds) (float64 .renewSeconds)) (lt (float64 .renewSeconds) (float64 .leaseSeconds))) }}
{{- fail (printf "settings.retrySeconds %v, settings.renewSeconds %v and settings.leaseSeconds %v must grow in this order: a leader stops acting before another one may begin" .retrySeconds .renewSeconds .leaseSeconds) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "rljob.environment" -}}
- name: RLJOB_IDENTITY
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: RLJOB_OPERATOR_NAMESPACE
  value: {{ .Release.Namespace | quote }}
- name: RLJOB_OPERATOR_POD_LABELS
  {{- $labels := list }}
  {{- range $key, $value := include "rljob.selectorLabels" . | fromYaml }}
  {{- $labels = append $labels (printf "%s=%s" $key $value) }}
  {{- end }}
  value: {{ join "," $labels | quote }}
- name: RLJOB_LEASE_NAME
  value: {{ include "rljob.fullname" . | quote }}
- name: RLJOB_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: RLJOB_WORKER_IMAGE
  value: {{ .Values.jobs.image | quote }}
- name: RLJOB_WORKER_IMAGES
  {{- $images := list }}
  {{- range $profile, $image := .Values.jobs.images }}
  {{- $images = append $images (printf "%s=%s" $profile $image) }}
  {{- end }}
  value: {{ join "," $images | quote }}
- name: RLJOB_KUBERAY_VERSION
  value: {{ .Values.jobs.kuberayVersion | quote }}
- name: RLJOB_RAY_VERSION
  value: {{ .Values.jobs.rayVersion | quote }}
- name: RLJOB_LABEL_PREFIXES
  value: {{ join "," .Values.jobs.labelPrefixes | quote }}
- name: RLJOB_POLICY
  value: {{ omit .Values.policy "admission" | toJson | quote }}
- name: RLJOB_HTTP_PORT
  value: "8080"
- name: RLJOB_PROBE_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: RLJOB_PROBE_PORT
  value: "8081"
- name: RLJOB_STOP_SECONDS
  value: {{ sub (int .Values.terminationGracePeriodSeconds) 10 | quote }}
{{- range $name, $value := .Values.settings }}
- name: RLJOB_{{ snakecase $name | upper }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* "true" when a kind of the Prometheus operator should be rendered. Arguments: context, kind, enabled (auto, always, never). */}}
{{- define "rljob.monitoring" -}}
{{- $known := .context.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) }}
{{- $enabled := toString .enabled }}
{{- if or (has $enabled (list "always" "true")) (and (eq $enabled "auto") $known) }}true{{ end }}
{{- end }}

{{- /* What the operator does with jobs, in each namespace that it watches; docs/install.md says why for each line. */}}
{{- define "rljob.jobRules" -}}
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch{{ if .Values.settings.kueuePriorityBoost }}, patch{{ end }}]
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch]
{{- if .Values.settings.sandboxClaims }}
- apiGroups: [extensions.agents.x-k8s.io]
  resources: [sandboxclaims]
  verbs: [get, list, create, delete]
{{- end }}
{{- end }}
