// A device plugin for tests: it advertises devices of a resource that are ordinary files.
//
//	device-plugin RESOURCE COUNT FOLDER
//
// Device i is the file FOLDER/davinci<i>, which a container that was given it sees as /dev/davinci<i>; it is told the
// devices' numbers in ASCEND_VISIBLE_DEVICES, as by the plugin of MindCluster. A file that is removed makes its device
// unhealthy. Everything else is kubelet's own protocol.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const lookEvery = time.Second

type plugin struct {
	api.UnimplementedDevicePluginServer
	count  int
	folder string
}

func (p *plugin) path(id string) string { return filepath.Join(p.folder, "davinci"+id) }

func (p *plugin) devices() []*api.Device {
	devices := make([]*api.Device, p.count)
	for i := range devices {
		id, health := strconv.Itoa(i), api.Healthy
		if _, err := os.Stat(p.path(id)); err != nil {
			health = api.Unhealthy
		}
		devices[i] = &api.Device{ID: id, Health: health}
	}
	return devices
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	last := ""
	for {
		devices := p.devices()
		if now := fmt.Sprint(devices); now != last {
			if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			last = now
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(lookEvery):
		}
	}
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		mounts := make([]*api.Mount, len(container.DevicesIds))
		for i, id := range container.DevicesIds {
			mounts[i] = &api.Mount{ContainerPath: "/dev/davinci" + id, HostPath: p.path(id), ReadOnly: true}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, &api.ContainerAllocateResponse{
			Envs:   map[string]string{"ASCEND_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
			Mounts: mounts,
		})
	}
	return answer, nil
}

// serve registers with kubelet and serves until kubelet, which forgets plugins when it starts, removes the socket.
func serve(resource string, p *plugin) error {
	name := "rljob-test.sock"
	socket := filepath.Join(api.DevicePluginPath, name)
	os.Remove(socket)
	listening, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go server.Serve(listening)
	defer server.Stop()

	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	limited, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: name, ResourceName: resource}
	if _, err := api.NewRegistrationClient(connection).Register(limited, request); err != nil {
		return err
	}
	log.Printf("registered %d devices of %s", p.count, resource)
	for {
		if _, err := os.Stat(socket); err != nil {
			return nil
		}
		time.Sleep(lookEvery)
	}
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: device-plugin RESOURCE COUNT FOLDER")
	}
	count, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatalf("COUNT: %v", err)
	}
	p := &plugin{count: count, folder: os.Args[3]}
	for {
		if err := serve(os.Args[1], p); err != nil {
			log.Print(err)
		}
		time.Sleep(lookEvery)
	}
}
