#version 450
// World-space normal for gbuffer.frag. The block layouts are SAPIEN 3's shader interface.

layout(set = 0, binding = 0) uniform CameraBuffer {
  mat4 viewMatrix;
  mat4 projectionMatrix;
  mat4 viewMatrixInverse;
  mat4 projectionMatrixInverse;
  float width;
  float height;
} cameraBuffer;

layout(set = 1, binding = 0) uniform ObjectTransformBuffer { mat4 modelMatrix; } objectTransformBuffer;
layout(set = 1, binding = 1) uniform ObjectDataBuffer {
  uvec4 segmentation;
  float transparency;
  int shadeFlat;
} objectDataBuffer;

layout(location = 0) in vec3 position;
layout(location = 1) in vec3 normal;
layout(location = 2) in vec2 uv;
layout(location = 3) in vec3 tangent;
layout(location = 4) in vec3 bitangent;

layout(location = 0) out vec3 outNormal;

void main() {
  outNormal = mat3(transpose(inverse(objectTransformBuffer.modelMatrix))) * normal;
  gl_Position = cameraBuffer.projectionMatrix * cameraBuffer.viewMatrix
      * (objectTransformBuffer.modelMatrix * vec4(position, 1));
}
