/* Search runs in a web worker, and browsers start none for pages that are opened from disk.
   There, the worker's script runs in a hidden frame instead, with the same messages. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.frame.contentDocument.createElement("script")
      script.src = url
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve))
      this.frame.contentDocument.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
